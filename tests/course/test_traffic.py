"""What the demonstrations count: each byte once that a rank sends, reads or writes, and the steps
that a learning rate takes with all seeds."""

import importlib
import sys

import pytest
import torch

import dpcore as dp
from tests.course.conftest import COURSE

sys.path.insert(0, str(COURSE))
from data import traffic

BYTES = 1 << 20


def moved_by(comm, algorithm):
    tensor = torch.ones(BYTES // 4)
    before, known = traffic(comm), comm.stats().get("all_reduce", {})
    comm.all_reduce(tensor, algorithm=algorithm)
    now = comm.stats()["all_reduce"]
    (path,) = [path for path in now if now[path] != known.get(path)]
    return path, traffic(comm) - before


@pytest.mark.parametrize(
    ("algorithm", "path"), [("one_shot", "one_shot/stage"), ("two_shot", "two_shot/stage")]
)
def test_what_goes_through_a_stage_is_counted_once(algorithm, path):
    """With two ranks, each gets the whole of the other's tensor, or half of it twice."""
    for found in dp.spawn(moved_by, 2, algorithm, timeout=60):
        assert found == (path, BYTES)


@pytest.mark.parametrize("algorithm", ["one_shot", "ring"])
def test_what_a_list_of_moves_sends_is_counted_once(algorithm):
    """Each rank sends its tensor, or both halves of it one after the other."""
    for found in dp.spawn(moved_by, 2, f"{algorithm}/moves", timeout=60):
        assert found == ("moves", BYTES)


def test_a_rate_that_diverges_is_not_chosen(monkeypatch):
    """It ends after ``most`` steps, which are few when another rate needs few."""
    pytest.importorskip("matplotlib")
    critical_batch = importlib.import_module("critical_batch")

    def steps_to_target(batch, rate, seed, most):
        wanted = {(1.0, 0): 10, (1.0, 1): 20, (2.0, 0): 4, (2.0, 1): 10**9}[rate, seed]
        return min(wanted, most)

    monkeypatch.setattr(critical_batch, "RATES", [1.0, 2.0])
    monkeypatch.setattr(critical_batch, "steps_to_target", steps_to_target)
    assert critical_batch.tuned(8, 100, [0, 1]) == 1.0
