"""A line while training: what steps cost, what of their communication is exposed, who is slow."""
