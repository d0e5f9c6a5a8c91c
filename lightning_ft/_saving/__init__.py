"""One save, from its options to the commit: what writes in the background, in which order, and what a failure means."""
