"""`benchmarks` is not installed: its scripts run from the checkout, and so do its tests."""

import sys
from pathlib import Path

import pytest

from tests.ranks.training import fork_ranks_that_train

sys.path.append(str(Path(__file__).resolve().parents[2]))


@pytest.fixture(autouse=True)
def _ranks_that_train_are_forked(monkeypatch):
    fork_ranks_that_train(monkeypatch)
