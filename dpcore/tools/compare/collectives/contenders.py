"""The contenders, and how the ranks of each are started."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from dpcore.base.user_code import without_folders
from dpcore.tools.compare.collectives.wires import LOOPBACK, Wire
from dpcore.tools.records import ROOT

START = Path(__file__).resolve().parent / "workers" / "start.py"
PEERS = ("gloo", "openmpi", "mpich")
TUNING = ("OMPI_MCA_", "MPIR_CVAR_", "UCX_", "FI_", "GLOO_", "DPCORE_")  # kept, and recorded
_OF_AN_OUTER_LAUNCHER = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "SLURM_")


@dataclass(frozen=True)
class Contender:
    """A line of the table. Several may share the processes of one group."""

    name: str
    group: str
    variant: str
    role: str  # ours | peer | bound
    bound: str  # the contender whose time no transport of this kind of memory can beat


# In place in the arena every byte is touched once, as by `x *= 0.5`; anything else copies.
ARENA = Contender("dpcore arena", "dpcore", "arena", "ours", "x *= 0.5")
PLAIN = Contender("dpcore plain", "dpcore", "plain", "ours", "memcpy")
CPP = Contender("dpcore in C++", "dpcore", "cpp", "ours", "x *= 0.5")
SCALE = Contender("x *= 0.5", "bounds", "scale", "bound", "x *= 0.5")
MEMCPY = Contender("memcpy", "bounds", "memcpy", "bound", "memcpy")
TCP = Contender("dpcore TCP", "dpcore-tcp", "plain", "ours", "raw TCP")
STREAM = Contender("raw TCP", "stream", "plain", "bound", "raw TCP")
IN_PLACE = Contender("raw, in place", "stream", "in_place", "bound", "raw TCP")
STREAMS = (STREAM, IN_PLACE)
OURS = (ARENA, PLAIN)
BOUNDS = (SCALE, MEMCPY)


def by_algorithm(algorithm: str) -> Contender:
    """dpcore with an algorithm that is named, instead of the one that it would choose."""
    name = without_folders(algorithm)
    return Contender(name, "dpcore", f"arena {algorithm}", "ours", "x *= 0.5")


_NAMES = {"gloo": "Gloo", "openmpi": "Open MPI", "mpich": "MPICH"}


def peer(name: str) -> Contender:
    return Contender(_NAMES[name], name, "plain", "peer", "memcpy")


def tcp_peer(name: str) -> Contender:
    """The same, kept from shared memory. Gloo has none."""
    group = name if name == "gloo" else f"{name}-tcp"
    return Contender(_NAMES[name], group, "plain", "peer", "raw TCP")


class NotInstalledError(Exception):
    """The environment of a contender is missing; the message says how to get it."""


def commands(group: str, world: int, job: str, wire: Wire = LOOPBACK) -> list[list[str]]:
    """The processes to start: one per rank, or one mpiexec that starts the ranks."""
    if group.removesuffix("-tcp") in ("openmpi", "mpich"):
        return [_mpiexec(group, world, job, wire)]
    return [
        wire.at(rank, [sys.executable, str(START), group, job, str(world), str(rank)])
        for rank in range(world)
    ]


def _mpiexec(group: str, world: int, job: str, wire: Wire) -> list[str]:
    library, _, tcp = group.partition("-")
    venv = _environment_of(library)
    mpiexec, python = venv / "bin" / "mpiexec", venv / "bin" / "python"
    options = _OPENMPI_OPTIONS if library == "openmpi" else []
    if library == "openmpi":  # it counts a core as one slot, however many processors that is
        slots = "--oversubscribe" if world > _cores() else "--use-hwthread-cpus"
        options = [*options, slots]
    rank = [str(python), str(START), group, job, str(world), "-1"]
    command = [str(mpiexec), "-n", str(world), *options]
    if not tcp:
        return [*command, *rank]
    more = wire.openmpi() if library == "openmpi" else wire.mpich()
    return wire.before_mpiexec(library, [*command, *more, *rank])


def _environment_of(library: str) -> Path:
    """One of its own, as Open MPI and MPICH both bring a libmpi.so: where dpcore was checked out,
    or in the folder where the program runs."""
    name = f".venv-{library}"
    for venv in (ROOT / name, Path.cwd() / name):
        if (venv / "bin" / "mpiexec").exists() and (venv / "bin" / "python").exists():
            return venv
    pip = f"{name}/bin/pip install numpy mpi4py {library}"
    raise NotInstalledError(f"not installed; this does it: python3 -m venv {name} && {pip}")


# With more ranks than cores MPICH spins out whole time slices, 15 ms for 8 bytes, unless told to
# sleep. Open MPI gives way by itself when it is started with --oversubscribe.
MPICH_OVERSUBSCRIBED = {
    "MPIR_CVAR_CH4_PROGRESS_THROTTLE": "1",
    "MPIR_CVAR_CH4_PROGRESS_THROTTLE_NO_PROGRESS_COUNT": "16",
}
# No rank is bound to a core: those of dpcore and Gloo are not either.
_OPENMPI_OPTIONS = ["--bind-to", "none"]


def environment(world: int, folder: str, huge_pages: bool, interface: str = "lo") -> dict[str, str]:
    """What all groups see. A rank is one core's worth of work, so no library may add threads."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(TUNING) or not name.startswith(_OF_AN_OUTER_LAUNCHER)
    }
    oversubscribed = MPICH_OVERSUBSCRIBED if world > _cores() else {}
    return (
        oversubscribed
        | inherited
        | {
            "TMPDIR": folder,  # whatever a library leaves behind goes with the folder
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": interface,
            "NUMPY_MADVISE_HUGEPAGE": "1" if huge_pages else "0",
            "OMPI_MCA_btl_sm_backing_directory": folder,
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
    )


def tuning() -> dict[str, str]:
    """Settings of the libraries that the caller has made."""
    return {name: value for name, value in os.environ.items() if name.startswith(TUNING)}


def _cores() -> int:
    return len(os.sched_getaffinity(0))
