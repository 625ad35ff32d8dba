"""The version of this package: one number, here alone."""

__version__ = "0.2.0"
