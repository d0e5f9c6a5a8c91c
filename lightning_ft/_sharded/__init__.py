"""Checkpoints that are directories, of which each rank writes and reads its part."""
