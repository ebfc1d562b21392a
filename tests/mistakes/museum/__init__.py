"""The museum: programs of some 20 lines, each one public kind of mistake with DDP."""

from tests.mistakes.museum import data, hyperparameters, modes, never_averaged, structure, weights
from tests.mistakes.museum.exhibit import EXHIBITS

__all__ = ["EXHIBITS", "data", "hyperparameters", "modes", "never_averaged", "structure", "weights"]
