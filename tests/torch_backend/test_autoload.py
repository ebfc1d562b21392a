"""The entry point: torch knows the backend without an import of dpcore, and never pays for it."""

import contextlib
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks import python

ROOT = Path(__file__).resolve().parents[2]


def run(code, folder, **variables):
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", **variables}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )


@pytest.fixture
def installed(tmp_path):
    """What pip writes for the entry point of pyproject.toml, before any installed dpcore."""
    project = (ROOT / "pyproject.toml").read_text()
    name, target = re.search(r'entry-points."torch.backends"]\n(\w+) = "(\S+)"', project).groups()
    lines = ["[torch.backends]", f"{name} = {target}"]
    folder = tmp_path / "dpcore-0.dist-info"
    folder.mkdir()
    (folder / "entry_points.txt").write_text("\n".join(lines) + "\n")
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: dpcore\nVersion: 0\n")
    return tmp_path


def test_the_name_is_known_and_nothing_heavy_is_loaded(installed):
    code = """
import sys, torch
import torch.distributed as dist
assert "dpcore" in dist.Backend.backend_list
heavy = {"dpcore._C", "dpcore.comm.launch.torch_backend"}
heavy |= {"dpcore.comm.launch.session", "dpcore.comm.communicators.native"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
dist.init_process_group("dpcore", store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(3)
dist.all_reduce(tensor)
assert dist.get_backend() == "dpcore" and tensor.tolist() == [1.0] * 3
dist.destroy_process_group()
"""
    result = run(code, installed)
    assert result.returncode == 0, result.stderr


def test_torch_is_imported_whatever_happens_in_it(installed):
    code = """
import sys, types
import torch.distributed as dist
broken = types.ModuleType("torch.distributed")
real, sys.modules["torch.distributed"] = sys.modules["torch.distributed"], broken
from dpcore._autoload import register
register()
"""
    result = run(code, installed)
    assert result.returncode == 0, result.stderr


def test_it_can_be_switched_off(installed):
    code = "import torch.distributed as dist; assert 'dpcore' not in dist.Backend.backend_list"
    result = run(code, installed, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert result.returncode == 0, result.stderr


# ---- dpcore:// -------------------------------------------------------------------------------

MEET = """
import os, time
before = dict(os.environ)
import torch
import torch.distributed as dist
assert dict(os.environ) == before
for last in (False, True):
    dist.init_process_group("dpcore", init_method="dpcore://")
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    if last:
        print(dist.get_rank(), dist.get_world_size(), total.item())
    elif dist.get_rank() == 0 and dist.get_world_size() == 2:
        time.sleep(1)  # the other one begins the next group while this one is still in the last
    dist.destroy_process_group()
"""
# As srun leaves them, for two tasks on one node, and for as many on two.
SLURM = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
NODES = {
    "one": {"SLURM_STEP_NUM_NODES": "1"},
    "two": {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "localhost"},
}


@pytest.fixture
def unlaunched(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def job_with_a_free_port():
    """The port at which rank 0 of a Slurm step listens is made from the job's number."""
    for job in range(os.getpid(), os.getpid() + 100):
        with socket.socket() as line, contextlib.suppress(OSError):
            line.bind(("localhost", 15000 + job % 10000))
            return str(job)
    raise AssertionError("no port is free")


@pytest.mark.parametrize("nodes", NODES)
def test_ranks_of_srun_find_their_place(installed, unlaunched, nodes):
    step = SLURM | NODES[nodes] | {"SLURM_JOB_ID": job_with_a_free_port()}
    ranks = [
        python.start(
            *("-c", MEET),
            env={**os.environ, **step, "PYTHONPATH": f"{installed}:{ROOT}", "SLURM_PROCID": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    said = [rank.communicate(timeout=120) for rank in ranks]
    assert [output for output, _ in said] == ["0 2 3\n", "1 2 3\n"], said


def test_without_a_launcher_it_is_a_world_of_one(installed, unlaunched):
    result = run(MEET, installed)
    assert result.stdout == "0 1 1\n", result.stderr


def test_without_a_rank_the_error_names_dpcore(installed, unlaunched):
    """That of another backend stays as torch has it."""
    code = """
import torch.distributed as dist
for backend in ("dpcore", "cpu:dpcore,cuda:nccl", "gloo"):
    try:
        dist.init_process_group(backend)
    except ValueError as error:
        text = str(error)
        assert "environment variable RANK expected, but not set" in text, text
        assert ('pass init_method="dpcore://"' in text) == ("dpcore" in backend), (backend, text)
"""
    result = run(code, installed)
    assert result.returncode == 0, result.stderr


def test_env_still_works(installed, unlaunched):
    code = MEET.replace(', init_method="dpcore://"', "")
    there = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    result = run(code, installed, **there)
    assert result.stdout == "0 1 1\n", result.stderr
