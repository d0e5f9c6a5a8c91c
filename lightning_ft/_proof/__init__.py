"""What happens within a run whose restart is proved: recorded, killed at a point, kept from the user's directories."""
