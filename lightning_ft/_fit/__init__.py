"""One fit: its life, what is due at its boundaries, what ends it, and how it reaches into Lightning's loops."""
