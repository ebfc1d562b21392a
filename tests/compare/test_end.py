"""How ranks of a comparison end: with torch's group destroyed.

Threads of a Gloo group that lives on may free a tensor while Python ends, which aborts the process.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dpcore.tools.compare.training.worker import Job

ROOT = Path(__file__).resolve().parents[2]

# Refers to itself, as models of Hugging Face do, and imports what keeps a group that exists.
MODEL = """
import torch

def make(rank, world):
    import torch.distributed.nn

    model = torch.nn.Sequential(torch.nn.Linear(3, 1))
    model.itself = [model]
    return model, lambda model: model(torch.ones(2, 3)).sum()
"""

AT_THE_END = """
import atexit, os, sys

@atexit.register
def show():
    threads = os.listdir("/proc/self/task")
    names = [open(f"/proc/self/task/{thread}/comm").read().strip() for thread in threads]
    print("left:", sorted(name for name in names if "gloo" in name), file=sys.stderr)
"""

A_STEP = """
import torch
import torch.distributed as dist
from dpcore import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(3, 1))
model(torch.ones(2, 3)).sum().backward()
del model
dist.destroy_process_group()
"""


def errors_of(program, *arguments):
    """Of a Python of its own, since what was imported when is what matters."""
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    run = subprocess.run(
        [sys.executable, "-c", AT_THE_END + program, *arguments],
        env={**os.environ, **place, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    return run.stderr


@pytest.mark.parametrize("contenders", [["torch", "alone"], ["dpcore", "all_reduce torch"]])
def test_no_thread_of_a_rank_outlives_its_group(tmp_path, contenders):
    (tmp_path / "own.py").write_text(MODEL)
    model = f"{tmp_path / 'own.py'}:make"
    job = Job(model, contenders, rounds=1, steps=1, folder="", world=1, optimizer="")
    program = "from dpcore.tools.compare.training import worker\nworker.main()"
    errors = errors_of(program, job.to_json())
    assert "left: []" in errors


def test_a_step_leaves_nothing_that_keeps_the_group():
    assert "left: []" in errors_of(A_STEP)
