"""The ranks of `dpcore.tools.compare`, forked from a Python that has imported torch."""

import sys
from types import SimpleNamespace

from tests.ranks import python

STARTERS = ("dpcore.tools.compare.training.start", "dpcore.tools.compare.collectives.contenders")


def fork_ranks_that_train(monkeypatch):
    replaced = SimpleNamespace(**{**vars(sys), "executable": python.executable()})
    for module in STARTERS:
        monkeypatch.setattr(f"{module}.sys", replaced)
