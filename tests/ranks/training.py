"""The ranks of `dpcore.compare`, forked from a Python that has imported torch."""

import sys
from types import SimpleNamespace

from tests.ranks import python

STARTERS = ("dpcore.compare.training.start", "dpcore.compare.collectives.contenders")


def fork_ranks_that_train(monkeypatch):
    replaced = SimpleNamespace(**{**vars(sys), "executable": python.executable()})
    for module in STARTERS:
        monkeypatch.setattr(f"{module}.sys", replaced)
