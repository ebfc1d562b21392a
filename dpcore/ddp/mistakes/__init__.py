"""Mistakes with data parallel training that no error shows: found, and told."""
