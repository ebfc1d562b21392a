"""The core as C++ programs under the address, undefined-behaviour and thread sanitizers."""

import itertools
import os

import pytest

from tests.cpp import programs

FULL = os.environ.get("DPCORE_TEST_FULL") == "1"
pytestmark = pytest.mark.timeout(1800)  # the first of a flavour builds it


@pytest.fixture(scope="module", params=["asan", "tsan"])
def flavour(request):
    return request.param


def run_program(flavour, name, *arguments):
    return programs.run(programs.built(f"{flavour}/{name}"), *arguments)


@pytest.mark.parametrize(
    ("world", "transport"),
    [*itertools.product([1, 2, 3, 5], ["inproc", "tcp"]), (3, "hosts"), (5, "hosts")],
)
def test_random_operations_of_ranks_as_threads(flavour, world, transport):
    rounds, seeds = (400, range(8)) if FULL else (60 if world < 5 else 30, range(2))
    for seed in seeds:
        said = run_program(flavour, "stress", world, seed, rounds, transport)
        assert f"world {world}, seed {seed}, {rounds} rounds: fine" in said


def test_frames_that_no_rank_would_send(flavour):
    rounds, seeds = (300, range(8)) if FULL else (30, range(2))
    for seed in seeds:
        assert f"seed {seed}, {rounds} rounds: fine" in run_program(flavour, "frames", seed, rounds)


def test_who_waits_gets_the_lock_of_a_progress_thread_that_would_sleep(flavour):
    assert "the shortest wait" in run_program(flavour, "handover", 10)
