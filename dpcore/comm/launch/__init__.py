"""How ranks start, find their rank and each other."""
