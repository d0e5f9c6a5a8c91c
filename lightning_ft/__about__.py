"""The version of the package, and nothing else: the build reads it without importing the package."""

__version__ = "0.1.0.dev0"
