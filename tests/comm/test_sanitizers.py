"""The core as C++ programs under the address, undefined-behaviour and thread sanitizers.

There is no suppression file: what they report is a fault.
"""

import itertools
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FULL = os.environ.get("DPCORE_TEST_FULL") == "1"
ENVIRONMENT = {
    "asan": {"ASAN_OPTIONS": "detect_leaks=1", "UBSAN_OPTIONS": "print_stacktrace=1"},
    "tsan": {"TSAN_OPTIONS": "halt_on_error=1 second_deadlock_stack=1"},
}


pytestmark = pytest.mark.timeout(1800)  # the first of a flavour builds it


@pytest.fixture(scope="module", params=sorted(ENVIRONMENT))
def flavour(request):
    programs = [f"build/cpp/{request.param}/{name}" for name in ("stress", "frames")]
    subprocess.run(["make", "-s", "-j2", *programs], cwd=ROOT, check=True, timeout=1500)
    return request.param


def run_program(flavour, name, *arguments):
    """What it says; it must end well."""
    run = subprocess.run(
        [ROOT / "build" / "cpp" / flavour / name, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, **ENVIRONMENT[flavour]},
    )
    assert run.returncode == 0, f"{arguments}:\n{run.stdout}\n{run.stderr[-6000:]}"
    return run.stdout


@pytest.mark.parametrize(
    ("world", "transport"),
    [*itertools.product([1, 2, 3, 5], ["inproc", "tcp"]), (3, "hosts"), (5, "hosts")],
)
def test_random_operations_of_ranks_as_threads(flavour, world, transport):
    rounds, seeds = (400, range(8)) if FULL else (60, range(2))
    for seed in seeds:
        said = run_program(flavour, "stress", world, seed, rounds, transport)
        assert f"world {world}, seed {seed}, {rounds} rounds: fine" in said


def test_frames_that_no_rank_would_send(flavour):
    rounds, seeds = (300, range(8)) if FULL else (30, range(2))
    for seed in seeds:
        assert f"seed {seed}, {rounds} rounds: fine" in run_program(flavour, "frames", seed, rounds)
