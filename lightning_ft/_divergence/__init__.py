"""`DivergenceGuard` at work: losses, the last finite checkpoint, going back, batches left out."""
