"""Names the algorithm of examples/swing.py, for tests of algorithms of a program's own."""

from pathlib import Path

SWING = f"{Path(__file__).parent.parent / 'examples' / 'swing.py'}:swing"
