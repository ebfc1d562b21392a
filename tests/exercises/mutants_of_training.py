"""Of the other exercises about training; mutants.py says how to read it."""

TEXT = """
"""
