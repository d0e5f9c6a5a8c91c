"""One fit: its life, what is due at its boundaries, what ends it, and the one place that reaches into Lightning."""
