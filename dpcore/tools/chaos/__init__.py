"""``dpcore chaos``: a training under faults, and what they cost it."""
