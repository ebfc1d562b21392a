"""Kernels that wait for each other, as threads under the thread sanitizer: sums, a rank that stays
away, a host that gives up, and numbers that come around at 2^32."""

import os

import pytest

from tests.cpp import programs

FULL = os.environ.get("DPCORE_TEST_FULL") == "1"
ROUNDS = 100 if FULL else 30  # two numbers each; the first is 40 before 2^32

pytestmark = pytest.mark.timeout(1800)  # the first builds the program


@pytest.fixture(scope="module")
def program():
    return programs.built("tsan/barriers")


@pytest.mark.parametrize("end", ["all", "absent", "stopped"])
@pytest.mark.parametrize("world", [2, 3, 5] if FULL else [2, 4])
def test_ranks_meet_or_say_who_did_not_come(program, world, end):
    for seed in range(5 if FULL else 1):
        says = f"world {world}, seed {seed}, {ROUNDS} rounds, {end}: fine"
        programs.run(program, world, seed, ROUNDS, end, says=says)
