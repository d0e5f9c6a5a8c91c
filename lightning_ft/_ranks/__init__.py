"""What ranks tell each other, and what they do when one of them fails."""
