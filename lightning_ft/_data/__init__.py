"""Positions in the data: the order of a pass, the loaders of a run, and what becomes of both on other ranks."""
