"""A restart: which checkpoint is taken, how it is verified and read, and how its state comes back on all ranks."""
