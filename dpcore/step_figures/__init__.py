"""A line while training: what steps cost, how much communication is exposed, who is slow."""
