"""Helpers for all other folders: files, names of the machine, markup, code of the user."""
