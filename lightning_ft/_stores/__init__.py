"""Object stores: any of fsspec, and S3 through fewer requests; reading in ranges; deadlines, and what errors mean."""
