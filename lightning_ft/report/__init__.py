"""What became of a run: starts, saves, failures, lost work, goodput, and how often to save.

`summary` has the figures, `figure` the picture (matplotlib), `page` the document for a browser.
"""
