"""The version, written once: packaging reads it without importing the package."""

__version__ = "0.1.0"
