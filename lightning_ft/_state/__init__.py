"""What Lightning leaves out of a checkpoint: random state, partial metrics; digests; whose state goes to whom."""
