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


def test_bytes_of_a_step_are_those_of_no_other_step():
    """All-gathers of "zero1" and "zero2" end under the next forward. Counted between moments at
    which nothing is in flight, a step of either moves what one of data parallel training does."""
    pytest.importorskip("matplotlib")
    strategies = importlib.import_module("strategies")

    def body(comm):
        found = {}
        for schedule in ("bucketed", "zero1", "zero2"):
            made = strategies.data_parallel(comm, 1, schedule)
            turns = [strategies.train(made, comm, 3 * turn, 2)["moved"] for turn in range(3)]
            found[schedule] = turns[1:]  # the first one has the broadcast of the model in it
        return found

    for found in dp.spawn(body, 2, timeout=120):
        (moved,) = set(found["bucketed"])
        for schedule in ("zero1", "zero2"):
            assert found[schedule] == pytest.approx([moved] * 2, rel=1e-3)


def test_one_value_has_no_interval():
    pytest.importorskip("matplotlib")
    figures = importlib.import_module("figures")
    assert figures.spread([9.0, 10.0, 11.0]).text() == "10.0 ± 2.5"
    assert figures.spread([9.0]).text() == "9.0 (one value)"
    assert figures.over(5, "seeds") == "mean and 95% over 5 seeds"
    assert "95%" not in figures.over(1, "seeds")


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
