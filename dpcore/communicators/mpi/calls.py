"""The collectives of ``MpiCommunicator``: what each asks of MPI."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import torch

from dpcore.communicators.checks import (
    check_both,
    check_peer,
    check_presence,
    check_rank,
    check_timeout,
    expect,
    lengths_of,
    refuse,
)
from dpcore.communicators.mpi import numbers, reductions
from dpcore.communicators.mpi.engine import Engine
from dpcore.communicators.mpi.numbers import flat_of, message, pair_of, parts
from dpcore.communicators.mpi.operation import MpiWork, Stage, What
from dpcore.communicators.protocol import Operator
from dpcore.communicators.words import OtherNames, operator_name
from dpcore.errors import Error, Mismatch, Unsupported


class MpiCalls(OtherNames):
    """Of a group of ranks; ``MpiCommunicator`` says who they are."""

    rank: int
    world_size: int
    calls: int  # collectives so far
    line: deque[MpiWork]  # what is not posted yet
    _mpi: Any  # the module mpi4py.MPI
    _comm: Any  # of mpi4py
    _engine: Engine
    _timeout: float
    _messages: int
    _counts: Counter[tuple[str, str]]
    _closed: bool

    # ---- whole buffers -----------------------------------------------------------------------

    def all_reduce(
        self, tensor: Any, op: Operator = "sum", *, factor: float = 1.0, **options: Any
    ) -> MpiWork | None:
        """See ``Communicator.all_reduce``."""
        call, op = self._call(options), operator_name(op)
        own = flat_of(tensor)
        how = numbers.reduction_of(self._mpi, op, own.dtype, factor, self.world_size)
        stages = reductions.all_reduced(self._mpi, self._comm, own, how)
        return self._run("all_reduce", own, stages, [tensor], call, op)

    def broadcast(self, tensor: Any, root: int = 0, **options: Any) -> MpiWork | None:
        """See ``Communicator.broadcast``."""
        call = self._call(options)
        check_rank(root, self.world_size, "root")
        own = flat_of(tensor)
        stage = Stage(lambda: self._comm.Ibcast(message(self._mpi, own), root))
        return self._run("broadcast", own, [stage], [tensor], call, root=root)

    def reduce(
        self,
        tensor: Any,
        root: int = 0,
        op: Operator = "sum",
        *,
        factor: float = 1.0,
        **options: Any,
    ) -> MpiWork | None:
        """See ``Communicator.reduce``. The others' tensors stay as they are."""
        call = self._call(options)
        check_rank(root, self.world_size, "root")
        own, op = flat_of(tensor), operator_name(op)
        how = numbers.reduction_of(self._mpi, op, own.dtype, factor, self.world_size)
        stages = reductions.reduced(self._mpi, self._comm, own, how, root)
        return self._run("reduce", own, stages, [tensor], call, op, root)

    # ---- a part per rank ---------------------------------------------------------------------

    def reduce_scatter(
        self,
        output: Any,
        input: Any,
        op: Operator = "sum",
        *,
        sizes: Sequence[int] | None = None,
        factor: float = 1.0,
        **options: Any,
    ) -> MpiWork | None:
        """See ``Communicator.reduce_scatter``."""
        call = self._call(options)
        target, own = pair_of(output, input)
        lengths = lengths_of(sizes, target.numel(), self.world_size)
        expect(own.numel(), sum(lengths), "input")
        expect(target.numel(), lengths[self.rank], "output")
        op = operator_name(op)
        how = numbers.reduction_of(self._mpi, op, own.dtype, factor, self.world_size)
        stages = reductions.scattered(self._mpi, self._comm, target, own, lengths, how)
        return self._run("reduce_scatter", own, stages, [output, input], call, op)

    def all_gather(
        self, output: Any, input: Any, *, sizes: Sequence[int] | None = None, **options: Any
    ) -> MpiWork | None:
        """See ``Communicator.all_gather``."""
        call = self._call(options)
        target, own = pair_of(output, input)
        lengths = lengths_of(sizes, own.numel(), self.world_size)
        expect(own.numel(), lengths[self.rank], "input")
        expect(target.numel(), sum(lengths), "output")
        mine, all_parts = self._mine(target, own, lengths), parts(self._mpi, target, lengths)
        stage = Stage(lambda: self._comm.Iallgatherv(mine, all_parts))
        return self._run("all_gather", target, [stage], [output, input], call)

    def gather(
        self,
        output: Any | None,
        input: Any,
        root: int = 0,
        *,
        sizes: Sequence[int] | None = None,
        **options: Any,
    ) -> MpiWork | None:
        """See ``Communicator.gather``."""
        call = self._call(options)
        check_rank(root, self.world_size, "root")
        check_presence(output, "output", self.rank, root)
        own = flat_of(input)
        target = None if output is None else pair_of(output, input)[0]
        lengths = lengths_of(sizes, own.numel(), self.world_size)
        expect(own.numel(), lengths[self.rank], "input")
        if target is None:
            mine, all_parts = message(self._mpi, own), None
        else:
            expect(target.numel(), sum(lengths), "output")
            mine, all_parts = self._mine(target, own, lengths), parts(self._mpi, target, lengths)
        stage = Stage(lambda: self._comm.Igatherv(mine, all_parts, root))
        return self._run("gather", own, [stage], [output, input], call, root=root)

    def scatter(
        self,
        output: Any,
        input: Any | None,
        root: int = 0,
        *,
        sizes: Sequence[int] | None = None,
        **options: Any,
    ) -> MpiWork | None:
        """See ``Communicator.scatter``."""
        call = self._call(options)
        check_rank(root, self.world_size, "root")
        check_presence(input, "input", self.rank, root)
        target = flat_of(output)
        lengths = lengths_of(sizes, target.numel(), self.world_size)
        expect(target.numel(), lengths[self.rank], "output")
        mine, all_parts = message(self._mpi, target), None
        if input is not None:
            whole = pair_of(output, input)[1]
            expect(whole.numel(), sum(lengths), "input")
            mine = self._mine(whole, target, lengths)
            all_parts = parts(self._mpi, whole, lengths)
        stage = Stage(lambda: self._comm.Iscatterv(all_parts, mine, root))
        return self._run("scatter", target, [stage], [output, input], call, root=root)

    def all_to_all(
        self,
        output: Any,
        input: Any,
        *,
        output_sizes: Sequence[int] | None = None,
        input_sizes: Sequence[int] | None = None,
        **options: Any,
    ) -> MpiWork | None:
        """See ``Communicator.all_to_all``."""
        call = self._call(options)
        check_both(output_sizes, input_sizes)
        target, own = pair_of(output, input)
        sends = lengths_of(input_sizes, own.numel() // self.world_size, self.world_size)
        takes = lengths_of(output_sizes, sends[0], self.world_size)
        expect(own.numel(), sum(sends), "input")
        expect(target.numel(), sum(takes), "output")
        given = parts(self._mpi, numbers.beside(target, own), sends)
        taken = parts(self._mpi, target, takes)
        stage = Stage(lambda: self._comm.Ialltoallv(given, taken))
        return self._run("all_to_all", own, [stage], [output, input], call)

    # ---- messages and barriers ---------------------------------------------------------------

    def send(self, tensor: Any, dst: int, *, tag: int = 0, **options: Any) -> MpiWork | None:
        """See ``Communicator.send``."""
        call = self._call(options)
        check_peer(dst, self.rank, self.world_size)
        self._check_tag(tag)
        own = flat_of(tensor)
        stage = Stage(lambda: self._comm.Isend(message(self._mpi, own), dst, tag))
        return self._run("send", own, [stage], [tensor], call, peer=dst)

    def recv(self, tensor: Any, src: int | None, *, tag: int = 0, **options: Any) -> MpiWork | None:
        """See ``Communicator.recv``."""
        call = self._call(options)
        if src is not None:
            check_peer(src, self.rank, self.world_size)
        self._check_tag(tag)
        own = flat_of(tensor)
        source = self._mpi.ANY_SOURCE if src is None else src
        stage = Stage(lambda: self._comm.Irecv(message(self._mpi, own), source, tag))
        peer = -1 if src is None else src
        return self._run("recv", own, [stage], [tensor], call, peer=peer)

    def barrier(self, **options: Any) -> MpiWork | None:
        """See ``Communicator.barrier``."""
        return self._run("barrier", None, [Stage(self._comm.Ibarrier)], [], self._call(options))

    # ---- how -----------------------------------------------------------------------------------

    def _call(self, options: dict[str, Any]) -> tuple[bool, float]:
        """Whether to wait, and for how long. Before anything is touched."""
        async_op, timeout = options.pop("async_op", False), options.pop("timeout", 0.0)
        refuse(options, "backend='mpi'", "; use backend='native'")
        check_timeout(timeout)
        if self._closed:
            raise Error(f"rank {self.rank}: this communicator was closed; call init() again")
        self._engine.check()
        return async_op, timeout or self._timeout

    def _check_tag(self, tag: int) -> None:
        most = self._comm.Get_attr(self._mpi.TAG_UB)
        if not 0 <= tag <= most:
            raise Unsupported(f"tag {tag}: tags of MPI are 0 to {most}")

    def _mine(self, whole: torch.Tensor, own: torch.Tensor, lengths: Sequence[int]) -> Any:
        """This rank's part beside the whole, or in its place within."""
        place = whole[numbers.begins(lengths)[self.rank] :]
        if own.numel() > 0 and place.data_ptr() == own.data_ptr():
            return self._mpi.IN_PLACE
        return message(self._mpi, numbers.beside(whole, own))

    def _run(
        self,
        name: str,
        flat: torch.Tensor | None,
        stages: Sequence[Stage],
        buffers: Sequence[Any],
        call: tuple[bool, float],
        op: str = "",
        root: int = -1,
        peer: int = -1,
    ) -> MpiWork | None:
        """``buffers``: the output first. They belong to the operation until it has ended."""
        async_op, seconds = call
        if name in ("send", "recv"):
            self._messages += 1
        else:
            self.calls += 1
        number = self._messages if name in ("send", "recv") else self.calls
        nbytes = 0 if flat is None else flat.nbytes
        self._counts[name, "operations"] += 1
        self._counts[name, "bytes"] += nbytes
        details = "" if flat is None else f"{flat.numel()} elements of {flat.dtype}"
        details += f", {op}" * bool(op) + f", root {root}" * (root >= 0)
        details += f", with rank {peer}" * (peer >= 0)
        what = What(name, number, nbytes, details, root, peer)
        work = MpiWork(self._engine, self, what, stages, list(buffers), seconds)
        self._engine.submit(work, self.line)
        if async_op:
            self._engine.wake()
            return work
        work.wait()
        return None

    def check_length(self, what: What, status: Any) -> None:
        """Of a message that was received. A longer one is an error of MPI."""
        got = status.Get_count(self._mpi.BYTE)
        if got != what.nbytes:
            raise Mismatch(
                f"rank {self.rank}: {what}: rank {status.Get_source()} sent {got} bytes, not "
                f"{what.nbytes}; both have to name the same size and type"
            )
