"""The calls of a communicator whose collectives a library runs: a process group of torch, or MPI.

Arguments are checked here, in the contract's words, and buffers become flat tensors. What the
library is then asked for is each kind's own.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from dpcore.comm.communicators.call_options import Sizes
from dpcore.comm.communicators.checks import (
    check_both,
    check_peer,
    check_presence,
    check_rank,
    check_timeout,
    expect,
    lengths_of,
    refuse,
)
from dpcore.comm.communicators.protocol import Operator
from dpcore.comm.communicators.words import OtherNames, operator_name
from dpcore.errors import Error, Unsupported

Handle = TypeVar("Handle")


class Call(NamedTuple):
    """One operation, as it was asked for."""

    name: str
    async_op: bool
    timeout: float
    op: str = ""
    root: int = -1
    peer: int = -1


class CheckedCalls(OtherNames, Generic[Handle]):
    """``_all_reduce`` and the others return what ``_run`` starts: the library's own requests."""

    rank: int
    world_size: int
    _closed: bool
    _who: str  # in errors
    _instead: str  # what has the options that this kind lacks
    _lacks: frozenset[str] = frozenset()  # options besides those that only the core has

    _all_reduce: Callable[[torch.Tensor, str, float], Any]
    _broadcast: Callable[[torch.Tensor, int], Any]
    _reduce: Callable[[torch.Tensor, str, float, int], Any]
    _reduce_scatter: Callable[[torch.Tensor, torch.Tensor, list[int], str, float], Any]
    _all_gather: Callable[[torch.Tensor, torch.Tensor, list[int]], Any]
    _gather: Callable[[torch.Tensor | None, torch.Tensor, list[int], int], Any]
    _scatter: Callable[[torch.Tensor, torch.Tensor | None, list[int], int], Any]
    _all_to_all: Callable[[torch.Tensor, torch.Tensor, list[int], list[int]], Any]
    _send: Callable[[torch.Tensor, int, int], Any]
    _recv: Callable[[torch.Tensor, int | None, int], Any]

    @abstractmethod
    def _flat(self, buffer: Any) -> torch.Tensor:
        """The memory of a buffer as a flat tensor."""

    @abstractmethod
    def _run(
        self, call: Call, flat: torch.Tensor | None, requests: Any, *buffers: Any
    ) -> Handle | None:
        """Starts the requests. ``flat`` counts in statistics; of ``buffers`` the first is the
        result."""

    # ---- whole buffers -----------------------------------------------------------------------

    def all_reduce(
        self, tensor: Any, op: Operator = "sum", *, factor: float = 1.0, **options: Any
    ) -> Handle | None:
        """See ``Communicator.all_reduce``."""
        call = self._call("all_reduce", options, op=operator_name(op), factor=factor)
        own = self._flat(tensor)
        return self._run(call, own, self._all_reduce(own, call.op, factor), tensor)

    def broadcast(self, tensor: Any, root: int = 0, **options: Any) -> Handle | None:
        """See ``Communicator.broadcast``."""
        call = self._call("broadcast", options, root=root)
        own = self._flat(tensor)
        return self._run(call, own, self._broadcast(own, root), tensor)

    def reduce(
        self,
        tensor: Any,
        root: int = 0,
        op: Operator = "sum",
        *,
        factor: float = 1.0,
        **options: Any,
    ) -> Handle | None:
        """See ``Communicator.reduce``. The others' tensors stay as they are."""
        call = self._call("reduce", options, op=operator_name(op), root=root, factor=factor)
        own = self._flat(tensor)
        return self._run(call, own, self._reduce(own, call.op, factor, root), tensor)

    # ---- a part per rank ---------------------------------------------------------------------

    def reduce_scatter(
        self,
        output: Any,
        input: Any,
        op: Operator = "sum",
        *,
        sizes: Sizes = None,
        factor: float = 1.0,
        **options: Any,
    ) -> Handle | None:
        """See ``Communicator.reduce_scatter``."""
        call = self._call("reduce_scatter", options, op=operator_name(op), factor=factor)
        target, own = self._pair(output, input)
        lengths = self._lengths(sizes, target, "output", own, "input")
        requests = self._reduce_scatter(target, own, lengths, call.op, factor)
        return self._run(call, own, requests, output, input)

    def all_gather(
        self, output: Any, input: Any, *, sizes: Sizes = None, **options: Any
    ) -> Handle | None:
        """See ``Communicator.all_gather``."""
        call = self._call("all_gather", options)
        target, own = self._pair(output, input)
        lengths = self._lengths(sizes, own, "input", target, "output")
        return self._run(call, target, self._all_gather(target, own, lengths), output, input)

    def gather(
        self,
        output: Any | None,
        input: Any,
        root: int = 0,
        *,
        sizes: Sizes = None,
        **options: Any,
    ) -> Handle | None:
        """See ``Communicator.gather``."""
        call = self._call("gather", options, root=root)
        check_presence(output, "output", self.rank, root)
        own = self._flat(input)
        target = None if output is None else self._pair(output, input)[0]
        lengths = self._lengths(sizes, own, "input", target, "output")
        return self._run(call, own, self._gather(target, own, lengths, root), output, input)

    def scatter(
        self,
        output: Any,
        input: Any | None,
        root: int = 0,
        *,
        sizes: Sizes = None,
        **options: Any,
    ) -> Handle | None:
        """See ``Communicator.scatter``."""
        call = self._call("scatter", options, root=root)
        check_presence(input, "input", self.rank, root)
        target = self._flat(output)
        whole = None if input is None else self._pair(output, input)[1]
        lengths = self._lengths(sizes, target, "output", whole, "input")
        return self._run(call, target, self._scatter(target, whole, lengths, root), output, input)

    def all_to_all(
        self,
        output: Any,
        input: Any,
        *,
        output_sizes: Sizes = None,
        input_sizes: Sizes = None,
        **options: Any,
    ) -> Handle | None:
        """See ``Communicator.all_to_all``."""
        call = self._call("all_to_all", options)
        check_both(output_sizes, input_sizes)
        target, own = self._pair(output, input)
        sends = lengths_of(input_sizes, own.numel() // self.world_size, self.world_size)
        takes = lengths_of(output_sizes, sends[0], self.world_size)
        expect(own.numel(), sum(sends), "input")
        expect(target.numel(), sum(takes), "output")
        return self._run(call, own, self._all_to_all(target, own, takes, sends), output, input)

    # ---- messages ----------------------------------------------------------------------------

    def send(self, tensor: Any, dst: int, *, tag: int = 0, **options: Any) -> Handle | None:
        """See ``Communicator.send``."""
        call = self._call("send", options, peer=dst, tag=tag)
        own = self._flat(tensor)
        return self._run(call, own, self._send(own, dst, tag), tensor)

    def recv(self, tensor: Any, src: int | None, *, tag: int = 0, **options: Any) -> Handle | None:
        """See ``Communicator.recv``."""
        call = self._call("recv", options, peer=src, tag=tag)
        own = self._flat(tensor)
        return self._run(call, own, self._recv(own, src, tag), tensor)

    # ---- checks ------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise Error(f"rank {self.rank}: this communicator was closed; call init() again")

    def _call(
        self,
        name: str,
        options: dict[str, Any],
        op: str = "",
        root: int | None = None,
        peer: int | None = None,
        **named: Any,
    ) -> Call:
        """Before anything is touched. ``named``: options that the method has by name."""
        given = options | named
        lacking = {key: given[key] for key in self._lacks & given.keys()}
        refuse(lacking, self._who, self._instead)
        async_op, timeout = options.pop("async_op", False), options.pop("timeout", 0.0)
        refuse(options, self._who, self._instead)
        check_timeout(timeout)
        self._check_open()
        if root is not None:
            check_rank(root, self.world_size, "root")
        if peer is not None:
            check_peer(peer, self.rank, self.world_size)
        return Call(
            name, async_op, timeout, op, -1 if root is None else root, -1 if peer is None else peer
        )

    def _pair(self, output: Any, input: Any) -> tuple[torch.Tensor, torch.Tensor]:
        target, own = self._flat(output), self._flat(input)
        if target.dtype != own.dtype:
            raise Unsupported(f"input is {own.dtype}, output is {target.dtype}")
        return target, own

    def _lengths(
        self,
        sizes: Sizes,
        own: torch.Tensor,
        own_role: str,
        whole: torch.Tensor | None,
        whole_role: str,
    ) -> list[int]:
        """Elements of each rank's part. ``own``: this rank's; ``whole``: all of them, if here."""
        lengths = lengths_of(sizes, own.numel(), self.world_size)
        expect(own.numel(), lengths[self.rank], own_role)
        if whole is not None:
            expect(whole.numel(), sum(lengths), whole_role)
        return lengths
