"""How ranks start, find their place and meet."""
