"""Ranks that an mpiexec starts: Open MPI's beside this Python, or MPICH's."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.ranks import python

ROOT = Path(__file__).resolve().parents[2]
MPIRUN = Path(sys.executable).with_name("mpirun")
MPICH = ROOT / ".venv-mpich"  # its library and launcher; `make .venv-mpich/.stamp`
WORLD = 2
_NOBODY = 65534

needs_mpi = pytest.mark.skipif(
    not MPIRUN.exists(), reason="Open MPI is not installed beside this Python"
)
_mpich = pytest.param(
    "mpich",
    marks=pytest.mark.skipif(
        not (MPICH / ".stamp").exists(), reason="type: make .venv-mpich/.stamp"
    ),
)
only_mpich = pytest.mark.parametrize("launcher", [_mpich])
each_mpi = pytest.mark.parametrize("launcher", ["openmpi", _mpich])


def mpirun(tmp_path, body, launcher="openmpi", world=WORLD, options=(), as_root=True, **variables):
    """Each rank writes what it says into a file of its own: mpirun mixes their output."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(body))
    without = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
    environment = {name: value for name, value in os.environ.items() if name not in without}
    environment |= {"PYTHONPATH": str(ROOT), "SAID": str(tmp_path), **variables}
    command = [MPIRUN, *["--allow-run-as-root"] * as_root, "--oversubscribe"]
    if launcher == "mpich":
        command = [MPICH / "bin" / "mpiexec"]
        environment["MPI4PY_LIBMPI"] = str(MPICH / "lib" / "libmpi.so.12")
    program = python.executable() if as_root else sys.executable  # others may not ask for forks
    run = subprocess.run(
        [*command, *options, "-n", str(world), program, script],
        env=environment, capture_output=True, text=True, timeout=120,
        user=None if as_root else _NOBODY,
    )  # fmt: skip
    said = [path.read_text() for path in sorted(tmp_path.glob("rank*"))]
    return run, said


SAY = """
import os
from pathlib import Path

def say(rank, *words):
    Path(os.environ["SAID"], f"rank{rank}").write_text(" ".join(map(str, words)))
"""
