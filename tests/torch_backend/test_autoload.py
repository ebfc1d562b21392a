"""The entry point: torch knows the backend without an import of dpcore, and never pays for it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
heavy = {"dpcore._C", "dpcore.torch_backend", "dpcore.session", "dpcore.communicator"}
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
