"""The vote of the ranks at every step, and within validations."""
