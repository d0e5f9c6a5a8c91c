"""The inside of checkpoints and directories, for people: described without executing anything, checked, compared."""
