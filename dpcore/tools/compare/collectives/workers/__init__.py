"""What runs inside a rank. Each contender is one file; `start.py` is the entry of them all."""
