"""Programs over the backend "dpcore" that end in every way but the tidy one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROUNDS = 100 if os.environ.get("DPCORE_TEST_FULL") else 2
pytestmark = pytest.mark.timeout(3700 if ROUNDS == 100 else 600)
STATUS = {"in_an_exception": 1, "by_sys_exit": 6, "one_rank_gave_up": 1}


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    run = subprocess.run(
        [
            sys.executable,
            str(Path(__file__).with_name("scripts.py")),
            str(tmp_path_factory.mktemp("stores")),
            str(ROUNDS),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300 if ROUNDS == 2 else 3600,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize(
    "case",
    [
        "nothing_left",
        "in_flight_and_forgotten",
        "kept_by_the_module",
        "in_an_exception",
        "by_sys_exit",
        "with_a_callback",
        "one_rank_gave_up",
    ],
)
def test_programs_end_as_they_say(ends, case):
    assert len(ends[case]) == 2 * ROUNDS
    for status, errors in ends[case]:
        assert status == STATUS.get(case, 0), errors
        assert "terminate called" not in errors and "Fatal Python error" not in errors
        if case == "one_rank_gave_up":
            assert "no more data" in errors
