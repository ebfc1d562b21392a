"""Programs over the backend "dpcore" that end in every way but the tidy one."""

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("scripts.py")
WORLD = 2
ROUNDS = 15 if os.environ.get("DPCORE_TEST_FULL") else 1  # 7 cases: 105 programs

STATUS = {"in_an_exception": 1, "by_sys_exit": 6, "one_rank_gave_up": 1}


def end_of(case, folder):
    store = folder / uuid.uuid4().hex
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), case, str(store), str(rank), str(WORLD)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        return [(rank.communicate(timeout=120)[1], rank.returncode) for rank in ranks]
    finally:
        for rank in ranks:
            rank.poll() is None and rank.send_signal(signal.SIGKILL)


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
def test_programs_end_as_they_say(case, tmp_path):
    for _ in range(ROUNDS):
        for errors, status in end_of(case, tmp_path):
            assert status == STATUS.get(case, 0), errors
            assert "terminate called" not in errors and "Fatal Python error" not in errors
            if case == "one_rank_gave_up":
                assert "no more data" in errors
