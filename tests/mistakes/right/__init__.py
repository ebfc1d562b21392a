"""Training loops of the field that are right: no word may be said of them."""

from tests.mistakes.right import accumulating, averaging, learning, loops, models
from tests.mistakes.right.known import PROGRAMS

__all__ = ["PROGRAMS", "accumulating", "averaging", "learning", "loops", "models"]
