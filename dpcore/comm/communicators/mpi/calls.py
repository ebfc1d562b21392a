"""The collectives of ``MpiCommunicator``: what each asks of MPI."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import torch

from dpcore.comm.communicators.checked_calls import Call, CheckedCalls
from dpcore.comm.communicators.mpi import numbers, reductions
from dpcore.comm.communicators.mpi.engine import Engine
from dpcore.comm.communicators.mpi.numbers import message, parts
from dpcore.comm.communicators.mpi.operation import MpiWork, Stage, What
from dpcore.errors import Mismatch, Unsupported

Stages = list[Stage]


class MpiCalls(CheckedCalls[MpiWork]):
    """What a group of ranks asks of MPI; ``MpiCommunicator`` says which ranks they are."""

    calls: int  # collectives so far
    line: deque[MpiWork]  # what is not posted yet
    _mpi: Any  # the module mpi4py.MPI
    _comm: Any  # of mpi4py
    _engine: Engine
    _timeout: float
    _messages: int
    _counts: Counter[tuple[str, str]]

    _lacks = frozenset({"algorithm", "priority", "layout"})
    _who, _instead = "backend='mpi'", "; use backend='native'"

    # ---- what MPI is asked for -----------------------------------------------------------------

    def _all_reduce(self, own: torch.Tensor, op: str, factor: float) -> Stages:
        return reductions.all_reduced(self._mpi, self._comm, own, self._how(own, op, factor))

    def _broadcast(self, own: torch.Tensor, root: int) -> Stages:
        return [Stage(lambda: self._comm.Ibcast(message(self._mpi, own), root))]

    def _reduce(self, own: torch.Tensor, op: str, factor: float, root: int) -> Stages:
        how = self._how(own, op, factor)
        return reductions.reduced(self._mpi, self._comm, own, how, root)

    def _reduce_scatter(
        self, target: torch.Tensor, own: torch.Tensor, lengths: list[int], op: str, factor: float
    ) -> Stages:
        how = self._how(own, op, factor)
        return reductions.scattered(self._mpi, self._comm, target, own, lengths, how)

    def _all_gather(self, target: torch.Tensor, own: torch.Tensor, lengths: list[int]) -> Stages:
        mine, all_parts = self._mine(target, own, lengths), parts(self._mpi, target, lengths)
        return [Stage(lambda: self._comm.Iallgatherv(mine, all_parts))]

    def _gather(
        self, target: torch.Tensor | None, own: torch.Tensor, lengths: list[int], root: int
    ) -> Stages:
        mine, all_parts = self._beside_all(target, own, lengths)
        return [Stage(lambda: self._comm.Igatherv(mine, all_parts, root))]

    def _scatter(
        self, target: torch.Tensor, whole: torch.Tensor | None, lengths: list[int], root: int
    ) -> Stages:
        mine, all_parts = self._beside_all(whole, target, lengths)
        return [Stage(lambda: self._comm.Iscatterv(all_parts, mine, root))]

    def _all_to_all(
        self, target: torch.Tensor, own: torch.Tensor, takes: list[int], sends: list[int]
    ) -> Stages:
        given = parts(self._mpi, numbers.beside(target, own), sends)
        taken = parts(self._mpi, target, takes)
        return [Stage(lambda: self._comm.Ialltoallv(given, taken))]

    def _send(self, own: torch.Tensor, dst: int, tag: int) -> Stages:
        self._check_tag(tag)
        return [Stage(lambda: self._comm.Isend(message(self._mpi, own), dst, tag))]

    def _recv(self, own: torch.Tensor, src: int | None, tag: int) -> Stages:
        self._check_tag(tag)
        source = self._mpi.ANY_SOURCE if src is None else src
        return [Stage(lambda: self._comm.Irecv(message(self._mpi, own), source, tag))]

    def _barrier(self) -> Stages:
        return [Stage(self._comm.Ibarrier)]

    # ---- how -----------------------------------------------------------------------------------

    def _check_open(self) -> None:
        super()._check_open()
        self._engine.check()

    def _flat(self, buffer: Any) -> torch.Tensor:
        return numbers.flat_of(buffer)

    def _how(self, own: torch.Tensor, op: str, factor: float) -> numbers.Reduction:
        return numbers.reduction_of(self._mpi, op, own.dtype, factor, self.world_size)

    def _check_tag(self, tag: int) -> None:
        most = self._comm.Get_attr(self._mpi.TAG_UB)
        if not 0 <= tag <= most:
            raise Unsupported(f"tag {tag}: MPI allows tags from 0 to {most}")

    def _mine(self, whole: torch.Tensor, own: torch.Tensor, lengths: Sequence[int]) -> Any:
        """This rank's part beside the whole, or in its place within."""
        place = whole[numbers.begins(lengths)[self.rank] :]
        if own.numel() > 0 and place.data_ptr() == own.data_ptr():
            return self._mpi.IN_PLACE
        return message(self._mpi, numbers.beside(whole, own))

    def _beside_all(
        self, whole: torch.Tensor | None, own: torch.Tensor, lengths: Sequence[int]
    ) -> tuple[Any, Any]:
        """This rank's part, and on the root all of them."""
        if whole is None:
            return message(self._mpi, own), None
        return self._mine(whole, own, lengths), parts(self._mpi, whole, lengths)

    def _run(
        self, call: Call, flat: torch.Tensor | None, requests: Stages, *buffers: Any
    ) -> MpiWork | None:
        """The buffers belong to the operation until it has ended. The first one is the result."""
        name, is_message = call.name, call.name in ("send", "recv")
        self._messages += is_message
        self.calls += not is_message
        number = self._messages if is_message else self.calls
        nbytes = 0 if flat is None else flat.nbytes
        self._counts[name, "operations"] += 1
        self._counts[name, "bytes"] += nbytes
        details = "" if flat is None else f"{flat.numel()} elements of {flat.dtype}"
        details += f", {call.op}" * bool(call.op) + f", root {call.root}" * (call.root >= 0)
        details += f", with rank {call.peer}" * (call.peer >= 0)
        what = What(name, number, nbytes, details, call.root, call.peer)
        seconds = call.timeout or self._timeout
        work = MpiWork(self._engine, self, what, requests, buffers, seconds)
        self._engine.submit(work, self.line)
        if call.async_op:
            self._engine.wake()
            return work
        work.wait()
        return None

    def check_length(self, what: What, status: Any) -> None:
        """Whether a received message has the expected length. A longer one is an error of MPI."""
        got = status.Get_count(self._mpi.BYTE)
        if got != what.nbytes:
            raise Mismatch(
                f"rank {self.rank}: {what}: rank {status.Get_source()} sent {got} bytes, not "
                f"{what.nbytes}; both have to name the same size and type"
            )
