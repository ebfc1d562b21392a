"""Ranks of a comparison are forked."""

import pytest

from tests.ranks.training import fork_ranks_that_train


@pytest.fixture(autouse=True)
def _ranks_that_train_are_forked(monkeypatch):
    fork_ranks_that_train(monkeypatch)
