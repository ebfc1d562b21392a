"""MPI in the same program: whether it was started, and how ranks meet through it.

A launcher gives each rank one line to itself (``pmi.py``, ``pmix.py``). Once MPI has started, the
line is MPI's, and what rank 0 has to tell the others goes by a broadcast of MPI.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import time
import uuid
from collections.abc import Iterator
from typing import Any

from dpcore.errors import RendezvousError

_BYTES = 512  # of a message: a key and an address
_ANSWER_SECONDS = 60.0
_LOOK_SECONDS = 0.001


def was_started() -> bool:
    """Whether MPI_Init was called in this process, by whatever binding, also if MPI has ended."""
    return _asks("MPI_Initialized")


def is_running() -> bool:
    """Whether MPI can be called."""
    return was_started() and not _asks("MPI_Finalized")


def _asks(function: str) -> bool:
    """The answer of a function that may be called at any time."""
    for library in _loaded_libraries():
        answer = ctypes.c_int(0)
        with contextlib.suppress(AttributeError):  # libmpi_mpifh and its kin
            getattr(library, function)(ctypes.byref(answer))
        if answer.value:
            return True
    return False


def _loaded_libraries() -> list[ctypes.CDLL]:
    with open("/proc/self/maps") as maps:
        fields = (line.split(maxsplit=5) for line in maps)
        paths = {parts[5].strip() for parts in fields if len(parts) == 6}
    found = []
    for path in sorted(paths):
        if os.path.basename(path).startswith("libmpi"):
            with contextlib.suppress(OSError):  # of another name space, or deleted
                found.append(ctypes.CDLL(path, mode=os.RTLD_NOLOAD))
    return found


def connect(rank: int, world_size: int, patience: float = _ANSWER_SECONDS) -> MpiStore | None:
    """The ranks of MPI, if the program uses mpi4py, MPI runs, and its ranks are numbered as ours.
    ``patience``: how many seconds to wait there for the others.

    Programs that call MPI from C keep the launcher's line: an import of mpi4py here could load
    another MPI.
    """
    mpi4py = sys.modules.get("mpi4py.MPI")
    if mpi4py is None or not is_running():
        return None
    world = mpi4py.COMM_WORLD
    if (world.Get_rank(), world.Get_size()) != (rank, world_size):
        return None
    return MpiStore(world, patience)


class MpiStore:
    """A ``dpcore.comm.launch.stores.Store``. All ranks call it, as they call a collective of
    MPI."""

    def __init__(self, world: Any, patience: float = _ANSWER_SECONDS) -> None:
        self._world, self._patience = world, patience

    @contextlib.contextmanager
    def publish(self, key: str, value: str) -> Iterator[None]:
        message = f"{key} {value}".encode()
        if len(message) > _BYTES:
            raise RendezvousError(f"{len(message)} bytes are too long to be published: {key}")
        self._broadcast(bytearray(message.ljust(_BYTES)), time.monotonic() + self._patience)
        yield

    def read(self, key: str, deadline: float) -> str:
        message = bytearray(_BYTES)
        self._broadcast(message, deadline)
        found, _, value = message.decode().partition(" ")
        if found != key:
            raise RendezvousError(
                f"rank {self._world.Get_rank()} expected {key} from rank 0 in a broadcast of MPI "
                f"and got {found}; all ranks have to call dpcore.init() at the same point"
            )
        return value.strip()

    def common_name(self) -> str:
        """A name that no other job has. The ranks agree on it once."""
        global _name
        if not _name and self._world.Get_rank() == 0:
            fresh = uuid.uuid4().hex
            with self.publish("dpcore/name", fresh):
                _name = fresh
        elif not _name:
            _name = self.read("dpcore/name", time.monotonic() + self._patience)
        return _name

    def _broadcast(self, message: bytearray, deadline: float) -> None:
        request = self._world.Ibcast(message, root=0)
        while not request.Test():
            if time.monotonic() > deadline:
                _abandoned.append((request, message))
                raise RendezvousError(
                    f"rank {self._world.Get_rank()}: the ranks of MPI did not all come to "
                    "dpcore.init() before the deadline; set MASTER_ADDR and MASTER_PORT to "
                    "start without MPI"
                )
            time.sleep(_LOOK_SECONDS)


_name = ""
_abandoned: list[Any] = []  # MPI may still write there
