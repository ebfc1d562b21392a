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


AFTER_GLOO = """
import sys, torch, torch.distributed as dist, dpcore
dist.init_process_group("gloo")
model = dpcore.DataParallel(torch.nn.Linear(2, 1))
tensors = [torch.ones(10) for _ in range(20)]
dist.barrier()
sys.setswitchinterval(5)  # seconds: nobody is given Python's lock in between
for tensor in tensors:
    dist.all_reduce(tensor)
"""


def test_a_program_ends_although_a_thread_of_gloo_waits_for_pythons_lock(tmp_path):
    """Without the wait at its end it is aborted."""
    script = tmp_path / "after_gloo.py"
    script.write_text(AFTER_GLOO)
    for _ in range(2):
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            script,
        ]
        run = subprocess.run(command, capture_output=True, text=True, timeout=180, cwd=tmp_path)
        assert run.returncode == 0, f"{run.returncode}: {run.stderr}"
