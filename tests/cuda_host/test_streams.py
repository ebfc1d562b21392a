"""The order that flags and events make, under the thread sanitizer: streams are threads here."""

import os

import pytest

from tests.cpp import programs

FULL = os.environ.get("DPCORE_TEST_FULL") == "1"

pytestmark = pytest.mark.timeout(1800)  # the first builds the program


@pytest.fixture(scope="module")
def program():
    return programs.built("tsan/streams")


# Of one process, or handed over as between processes, where the program's stream waits for flags.
@pytest.mark.parametrize("memory", ["address", "descriptor"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_random_operations_of_ranks_as_threads(program, world, memory, monkeypatch):
    monkeypatch.setenv("DPCORE_CUDA_MEMORY", memory)
    rounds, seeds = (300, range(8)) if FULL else (40, range(4))  # streams meet, then kernels do
    for seed in seeds:
        says = f"world {world}, seed {seed}, {rounds} rounds: fine"
        programs.run(program, world, seed, rounds, says=says)
