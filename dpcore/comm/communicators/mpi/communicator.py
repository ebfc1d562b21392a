"""``backend="mpi"``: the collectives of an MPI library, through mpi4py, on torch's CPU tensors.

    comm = dpcore.init(backend="mpi")                     # mpiexec -n 4 python train.py
    comm.all_reduce(gradient, op="mean")
    model = dpcore.DataParallel(module)

For networks that only an MPI drives well, and to compare. The ranks are those of
``MPI.COMM_WORLD``; ``MpiCommunicator(comm)`` takes any other communicator of mpi4py. It works on a
duplicate, so messages of the program never meet those of dpcore.

MPI reads and writes the memory of the tensors. Two things need memory besides: sums of float16 and
bfloat16 are added in float32, a block of some MiB at a time, and a part that lies in the buffer
that it is sent to is copied first. All ranks get the same bits as long as the library's own
algorithms give them, which Open MPI's and MPICH's do.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from dpcore.comm.communicators.checks import check_groups
from dpcore.comm.communicators.mpi.calls import MpiCalls
from dpcore.comm.communicators.mpi.engine import Engine
from dpcore.comm.communicators.protocol import Capabilities
from dpcore.errors import RendezvousError, Unsupported, raise_unheard

if TYPE_CHECKING:
    from dpcore import _C
    from dpcore.comm.communicators.mpi.recorder import Recorder


class MpiCommunicator(MpiCalls):
    """A group of ranks of MPI. Made by ``dpcore.init(backend="mpi")``, or of any communicator of
    mpi4py: all of its ranks make one at the same time."""

    _capabilities: ClassVar[Capabilities] = Capabilities(
        counts=True, traces=True, silent_in_profiler=True, on_processors=True
    )
    backend = "mpi"
    transport = "mpi"
    _link = ""

    def __init__(self, comm: Any = None, *, timeout: float = 30.0) -> None:
        from mpi4py import MPI

        given = MPI.COMM_WORLD if comm is None else comm
        if given.Is_inter():
            raise Unsupported("an intercommunicator has no ranks in common; pass its Merge()")
        own, for_words = (duplicate(given, timeout) for _ in range(2))
        self._begin(MPI, own, Engine(MPI, for_words), timeout, "", range(own.Get_size()))
        self.job = self._heard(uuid.uuid4().bytes)[0].hex()  # no other communicator has it

    def _begin(
        self,
        mpi: Any,
        comm: Any,
        engine: Engine,
        timeout: float,
        lineage: str,
        ranks: Sequence[int],
    ) -> None:
        self._mpi, self._comm, self._engine, self._timeout = mpi, comm, engine, timeout
        self.rank, self.world_size = comm.Get_rank(), comm.Get_size()
        self.lineage = lineage  # where it was split, the same on all its ranks
        self.ranks = list(ranks)  # by rank: the number in the communicator that all come from
        self.line = deque()
        self.calls = self._messages = self._splits = 0
        self._family = engine  # of traces
        self._counts = Counter()
        engine.enter(self)

    def _heard(self, said: bytes) -> list[bytes]:
        """What all ranks say, before the first call of the program."""
        mine = torch.tensor(list(said), dtype=torch.uint8)
        everyones = mine.new_empty(self.world_size, len(said))
        self.all_gather(everyones, mine)
        self._counts.clear()
        self.calls = 0
        return [bytes(of_rank) for of_rank in everyones.tolist()]

    @property
    def _native(self) -> Recorder:  # what a trace starts and stops
        return self._engine.recorder

    @property
    def _recorder(self) -> _C.Communicator:  # where a model's reducer records
        return self._engine.recorder.core

    @property
    def _on_host(self) -> MpiCommunicator:
        return self

    # ---- groups, life ------------------------------------------------------------------------

    def split(self, color: int | None, key: int = 0) -> MpiCommunicator | None:
        """See ``Communicator.split``. All groups end with the first that fails."""
        check_groups(color, key)
        self.barrier()  # which has a deadline
        with self._engine.lock:
            undefined = self._mpi.UNDEFINED
            comm = self._comm.Split(undefined if color is None else color, key)
            self._splits += 1
            if color is None:
                return None
            ranks = comm.group.Translate_ranks(range(comm.size), self._comm.group)
            part = object.__new__(MpiCommunicator)
            part._begin(
                self._mpi,
                comm,
                self._engine,
                self._timeout,
                f"{self.lineage}/{self._splits}.{color}",
                [self.ranks[rank] for rank in ranks],
            )
        return part

    def stats(self) -> dict[str, Any]:
        """The library, whether it may be called by several threads, and by collective how many
        operations there were, and bytes."""
        found: dict[str, Any] = {
            "backend": self.backend,
            "library": self._engine.library,
            "threads": self._engine.thread_level,
        }
        for name, unit in self._counts:
            found.setdefault(name, {})[unit] = self._counts[name, unit]
        return found

    def abort(self, reason: str) -> None:
        """Gives up: the waits of all ranks end with ``PeerLost`` and this text."""
        if not self._closed:
            self._engine.give_up(reason)

    def close(self) -> None:
        """Waits for what is in flight and leaves. Later calls raise. Closing twice is fine.

        Raises what went wrong and was not raised before. MPI itself goes on.
        """
        if self._closed:
            return
        self._closed = True
        self._engine.drain(self, self._timeout)
        self._engine.leave(self)
        if not (self._engine.failure.is_set or self._mpi.Is_finalized()):
            with self._engine.lock:
                self._comm.Free()
        raise_unheard(self._engine.failure.told_if_unacknowledged())

    @property
    def failed(self) -> bool:
        """Whether nothing can be called any more, since something went wrong."""
        return self._engine.failure.is_set

    @property
    def _place(self) -> str:
        return self._engine.library


def duplicate(comm: Any, timeout: float) -> Any:
    """Messages of the program and ours do not meet in it. All ranks of ``comm`` call it."""
    own, request = comm.Idup()
    deadline = time.monotonic() + timeout
    while not request.Test():
        if time.monotonic() > deadline:
            _abandoned.append((own, request))
            raise RendezvousError(
                f"rank {comm.Get_rank()}: not all {comm.Get_size()} MPI ranks arrived within "
                f"{timeout:g} s; all of them have to call dpcore.init(backend='mpi'), or to wrap "
                "their model"
            )
        time.sleep(_LOOK_SECONDS)
    return own


_LOOK_SECONDS = 0.001
_abandoned: list[Any] = []  # MPI may still write there
