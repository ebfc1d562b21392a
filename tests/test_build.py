"""Environments and building: torch of another environment, units, a toolkit that is too old."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools import build_units

ROOT = Path(__file__).resolve().parent.parent


def test_another_clone_that_is_installed_in_part_does_not_stop_it(tmp_path):
    """Whoever borrows the packages of an environment sees the entry points of its editable
    installs, but cannot import them; torch then refuses to be imported."""
    info = tmp_path / "elsewhere-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[torch.backends]\nelsewhere = not_importable:register\n"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}

    def run(*command):
        return subprocess.run(
            [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True
        )

    assert "Failed to load the backend extension" in run("-c", "import torch").stderr
    # Finds torch and names the sources; there is no C library to build.
    out = run("setup.py", "-q", "build_clib")
    assert out.returncode == 0, out.stderr


def test_every_source_is_in_one_unit():
    units = build_units.units_of(ROOT / "csrc")
    sources = [source for unit in units.values() for source in unit]
    files = (ROOT / "csrc").rglob("*.cpp")
    assert sorted(sources) == sorted(path.relative_to(ROOT / "csrc").as_posix() for path in files)


def test_the_table_of_units_names_what_is_there():
    for unit, parts in build_units.UNITS.items():
        for part in parts:
            assert (ROOT / "csrc" / part).exists(), f"{unit}: csrc has no {part}"


def test_a_unit_is_written_again_only_when_its_sources_change(tmp_path):
    """The compiler would run again for a newer date."""
    build_units.write_units({"one": ["a.cpp", "b.cpp"], "two": ["c.cpp"]}, tmp_path)
    text = (tmp_path / "one.cpp").read_text()
    assert text.endswith('#include "a.cpp"\n#include "b.cpp"\n')
    for file in tmp_path.iterdir():
        os.utime(file, (1, 1))
    build_units.write_units({"one": ["a.cpp"], "two": ["c.cpp"]}, tmp_path)
    assert (tmp_path / "one.cpp").stat().st_mtime > 1
    assert (tmp_path / "two.cpp").stat().st_mtime == 1


def test_a_borrowed_torch_has_its_launcher_in_the_environment(tmp_path, monkeypatch):
    """It starts the environment's Python, and not the one that torch belongs to."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import environment

    own = tmp_path / "bin"
    own.mkdir()
    (own / "python").symlink_to(sys.executable)
    environment.make_torchrun(own / "python")
    assert (own / "torchrun").read_text().startswith(f"#!{own}/python\n")
    (own / "torchrun").write_text("somebody's own")
    environment.make_torchrun(own / "python")
    assert (own / "torchrun").read_text() == "somebody's own"


@pytest.mark.parametrize(
    ("release", "says"),
    [
        ("12.4", "is of CUDA 12.4, dpcore needs 12.5 or newer"),
        (
            "12.5",
            "has no libcudart_static.a beside it",
        ),  # new enough, and the next thing is missing
        ("13.0", "has no libcudart_static.a beside it"),
    ],
)
def test_a_toolkit_that_is_too_old_is_named(tmp_path, release, says):
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(f"#!/bin/sh\necho Cuda compilation tools, release {release}, V{release}.1\n")
    nvcc.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    out = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_clib"],
        cwd=ROOT, env=os.environ | {"PATH": path, "DPCORE_CUDA": "1"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert out.returncode != 0
    assert f"{nvcc} {says}" in out.stderr
    assert "DPCORE_CUDA=0" in out.stderr
