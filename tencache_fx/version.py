"""The version of this package, for caches and dumps."""

__version__ = "0.1.0"
