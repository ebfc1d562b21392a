"""The order that flags and events make, under the thread sanitizer: streams are threads here."""

import os
import subprocess

import pytest

from tests.cuda_host.conftest import ROOT

FULL = os.environ.get("DPCORE_TEST_FULL") == "1"


pytestmark = pytest.mark.timeout(1800)  # the first builds the program


@pytest.fixture(scope="module")
def program():
    subprocess.run(
        ["make", "-s", "-j2", "build/cpp/tsan/streams"], cwd=ROOT, check=True, timeout=1500
    )
    return ROOT / "build" / "cpp" / "tsan" / "streams"


@pytest.mark.parametrize("world", [1, 2, 4])
def test_random_operations_of_ranks_as_threads(program, world):
    rounds, seeds = (300, range(8)) if FULL else (40, range(4))  # streams meet, then kernels do
    for seed in seeds:
        run = subprocess.run(
            [program, str(world), str(seed), str(rounds)],
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1 second_deadlock_stack=1"},
        )
        assert run.returncode == 0, f"{run.stdout}\n{run.stderr[-6000:]}"
        assert f"world {world}, seed {seed}, {rounds} rounds: fine" in run.stdout
