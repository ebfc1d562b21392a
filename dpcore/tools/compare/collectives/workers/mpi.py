"""Any MPI through mpi4py. Needs numpy and mpi4py only: an MPI has an environment of its own."""

from __future__ import annotations

from functools import partial
from typing import Any

import mpi4py
import numpy as np

from dpcore.comm.communicators.mpi.library import library_name
from dpcore.tools.compare.collectives.cells import ROOT, Cell
from dpcore.tools.compare.collectives.workers.backend import (
    CollectiveBackend,
    Operation,
    Place,
    UnsupportedError,
    ordinary_memory,
    pingpong,
)
from dpcore.tools.compare.collectives.workers.layout import Numbers

# mpi4py asks for MPI_THREAD_MULTIPLE unless told otherwise, which makes every call take locks.
mpi4py.rc.thread_level = "funneled"
from mpi4py import MPI  # noqa: E402


class MpiBackend(CollectiveBackend):
    def __init__(self, place: Place) -> None:
        self.comm = MPI.COMM_WORLD
        self.rank, self.world = self.comm.Get_rank(), self.comm.Get_size()
        if self.world != place.world:
            raise RuntimeError(f"mpiexec started {self.world} ranks, {place.world} were asked for")

    def versions(self) -> dict[str, str]:
        name = library_name(MPI.Get_library_version())
        return {"mpi": name, "mpi4py": mpi4py.__version__, "numpy": np.__version__}

    def empty(self, variant: str, dtype: str, elements: int) -> Numbers:
        return ordinary_memory(elements, dtype)

    def view(self, buffer: Numbers) -> Numbers:
        return buffer

    def barrier(self) -> None:
        self.comm.Barrier()

    def close(self) -> None:
        MPI.Finalize()

    def operation(self, cell: Cell, send: Any, receive: Any) -> Operation:
        comm, root = self.comm, self.rank == ROOT
        match cell.collective:
            case "all_reduce":
                return partial(comm.Allreduce, MPI.IN_PLACE, send)
            case "reduce_scatter":
                return partial(comm.Reduce_scatter_block, send, receive)
            case "all_gather":
                return partial(comm.Allgather, send, receive)
            case "broadcast":
                return partial(comm.Bcast, send, ROOT)
            case "reduce":
                given, taken = (MPI.IN_PLACE, send) if root else (send, None)
                return partial(comm.Reduce, given, taken, root=ROOT)
            case "gather":
                return partial(comm.Gather, send, receive, ROOT)
            case "scatter":
                return partial(comm.Scatter, send, receive, ROOT)
            case "all_to_all":
                return partial(comm.Alltoall, send, receive)
            case "barrier":
                return self.barrier
            case "send_recv":
                return pingpong(
                    self.rank, self.world, partial(comm.Send, send), partial(comm.Recv, send)
                )
        raise UnsupportedError(cell.collective)
