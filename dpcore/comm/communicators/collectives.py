"""The methods of a communicator, for all kinds of them: signatures, documentation, and what is the
same everywhere. The contract that they keep is in protocol.py.

With ``async_op=True`` each returns a handle, and otherwise None; type checkers are told as the
standard library tells them of such results, ``Work | Any``. Each gives its call to ``_calls``,
which is the compiled core or has its methods. Plain calls of the core enter no function here
(csrc/bindings/quick_method.cpp).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, cast

from dpcore import _C
from dpcore.comm.communicators.checks import OPERATORS, check_both
from dpcore.comm.communicators.protocol import (
    Algorithm,
    Capabilities,
    GradientGroup,
    Operator,
    Sizes,
)
from dpcore.comm.communicators.words import OtherNames, operator_name
from dpcore.errors import Unsupported

if TYPE_CHECKING:
    import torch


Work = TypeVar("Work")  # of each kind its own
Function = TypeVar("Function", bound=Callable[..., Any])


def quick(function: Function) -> Function:
    """A plain call goes straight to the core's method of this name; every other call is left to the
    function."""
    text = cast("FunctionType", function)
    names = text.__code__.co_varnames[1 : text.__code__.co_argcount]  # without self
    positional = len(names) - len(text.__defaults__ or ())
    return _C.quick_method(function, names, positional, OPERATORS)


class Collectives(OtherNames, Generic[Work]):
    """A group of ranks: ``Communicator`` over dpcore's core, or an adapter, which states what it
    lacks."""

    _capabilities: ClassVar[Capabilities] = Capabilities()
    _native: Any  # the compiled core, where there is one
    _calls: Any  # what has the methods of the core: it, or what stands in for it
    _handle: Callable[[Any, list[Any]], Work]  # of what ``_calls`` returns, and the result
    rank: int
    world_size: int

    # ---- whole buffers -----------------------------------------------------------------------

    @quick
    def all_reduce(
        self,
        tensor: Any,
        op: Operator = "sum",
        *,
        async_op: bool = False,
        algorithm: Algorithm = None,
        priority: int = 0,
        timeout: float = 0.0,
        factor: float = 1.0,
        layout: int = 0,
    ) -> Work | Any:
        """Combines ``tensor`` over all ranks; afterwards every rank holds the same result.

        ``op``: sum, mean, prod, min, max, band, bor, bxor, or premul_sum with this rank's
        ``factor``. The mean of integers is their sum, which wraps, divided and rounded toward zero.

        >>> comm.all_reduce(gradient, op="mean")        # doctest: +SKIP
        """
        op = op if isinstance(op, str) and op in OPERATORS else operator_name(op)
        work = self._calls.all_reduce(
            tensor, op=op, factor=factor, layout=layout,
            async_op=async_op, algorithm=algorithm, priority=priority, timeout=timeout,
        )  # fmt: skip
        return None if work is None else self._handle(work, [tensor])

    @quick
    def broadcast(
        self,
        tensor: Any,
        root: int = 0,
        *,
        async_op: bool = False,
        algorithm: Algorithm = None,
        priority: int = 0,
        timeout: float = 0.0,
        layout: int = 0,
    ) -> Work | Any:
        """Copies ``tensor`` of rank ``root`` to all ranks."""
        work = self._calls.broadcast(
            tensor, root=root, layout=layout,
            async_op=async_op, algorithm=algorithm, priority=priority, timeout=timeout,
        )  # fmt: skip
        return None if work is None else self._handle(work, [tensor])

    @quick
    def reduce(
        self,
        tensor: Any,
        root: int = 0,
        op: Operator = "sum",
        *,
        async_op: bool = False,
        algorithm: Algorithm = None,
        priority: int = 0,
        timeout: float = 0.0,
        factor: float = 1.0,
    ) -> Work | Any:
        """Like ``all_reduce``, but only ``root`` gets the result; the others keep their data."""
        op = op if isinstance(op, str) and op in OPERATORS else operator_name(op)
        work = self._calls.reduce(
            tensor, root=root, op=op, factor=factor,
            async_op=async_op, algorithm=algorithm, priority=priority, timeout=timeout,
        )  # fmt: skip
        return None if work is None else self._handle(work, [tensor])

    # ---- a part per rank ---------------------------------------------------------------------

    @quick
    def reduce_scatter(
        self,
        output: Any,
        input: Any,
        op: Operator = "sum",
        *,
        sizes: Sizes = None,
        async_op: bool = False,
        algorithm: Algorithm = None,
        priority: int = 0,
        timeout: float = 0.0,
        factor: float = 1.0,
    ) -> Work | Any:
        """Combines ``input`` over all ranks and leaves the r-th part of it in rank r's ``output``.

        ``sizes``: elements of each rank's part when they are not equal.

        >>> comm.reduce_scatter(shard, gradients, op="mean")     # doctest: +SKIP
        """
        op = op if isinstance(op, str) and op in OPERATORS else operator_name(op)
        work = self._calls.reduce_scatter(
            output, input, op=op, factor=factor, input_sizes=sizes,
            async_op=async_op, algorithm=algorithm, priority=priority, timeout=timeout,
        )  # fmt: skip
        return None if work is None else self._handle(work, [output])

    @quick
    def all_gather(
        self,
        output: Any,
        input: Any,
        *,
        sizes: Sizes = None,
        async_op: bool = False,
        algorithm: Algorithm = None,
        priority: int = 0,
        timeout: float = 0.0,
        layout: int = 0,
    ) -> Work | Any:
        """Puts the ``input`` of all ranks one after the other into each rank's ``output``."""
        work = self._calls.all_gather(
            output, input, input_sizes=sizes, layout=layout,
            async_op=async_op, algorithm=algorithm, priority=priority, timeout=timeout,
        )  # fmt: skip
        return None if work is None else self._handle(work, [output])

    @quick
    def gather(
        self,
        output: Any | None,
        input: Any,
        root: int = 0,
        *,
        sizes: Sizes = None,
        async_op: bool = False,
        algorithm: Algorithm = None,
        priority: int = 0,
        timeout: float = 0.0,
    ) -> Work | Any:
        """``all_gather`` for one rank: ``output`` is None on the others."""
        work = self._calls.gather(
            output, input, root=root, input_sizes=sizes,
            async_op=async_op, algorithm=algorithm, priority=priority, timeout=timeout,
        )  # fmt: skip
        return None if work is None else self._handle(work, [] if output is None else [output])

    @quick
    def scatter(
        self,
        output: Any,
        input: Any | None,
        root: int = 0,
        *,
        sizes: Sizes = None,
        async_op: bool = False,
        algorithm: Algorithm = None,
        priority: int = 0,
        timeout: float = 0.0,
    ) -> Work | Any:
        """Gives the r-th part of ``root``'s ``input`` to rank r; ``input`` is None elsewhere."""
        work = self._calls.scatter(
            output, input, root=root, input_sizes=sizes,
            async_op=async_op, algorithm=algorithm, priority=priority, timeout=timeout,
        )  # fmt: skip
        return None if work is None else self._handle(work, [output])

    @quick
    def all_to_all(
        self,
        output: Any,
        input: Any,
        *,
        output_sizes: Sizes = None,
        input_sizes: Sizes = None,
        async_op: bool = False,
        algorithm: Algorithm = None,
        priority: int = 0,
        timeout: float = 0.0,
    ) -> Work | Any:
        """Sends the d-th part of ``input`` to rank d; ``output`` holds what came, in rank order.

        With uneven parts both lists are needed: ``input_sizes[d]`` here is ``output_sizes`` at
        this rank's place on rank d.
        """
        check_both(output_sizes, input_sizes)
        work = self._calls.all_to_all(
            output, input, input_sizes=input_sizes, output_sizes=output_sizes,
            async_op=async_op, algorithm=algorithm, priority=priority, timeout=timeout,
        )  # fmt: skip
        return None if work is None else self._handle(work, [output])

    # ---- messages and barriers ---------------------------------------------------------------

    @quick
    def send(
        self, tensor: Any, dst: int, *, tag: int = 0, async_op: bool = False, timeout: float = 0.0
    ) -> Work | Any:
        """Sends to rank ``dst``. Returns when ``tensor`` may be changed again."""
        work = self._calls.send(tensor, dst, tag=tag, timeout=timeout, async_op=async_op)
        return None if work is None else self._handle(work, [tensor])

    @quick
    def recv(
        self,
        tensor: Any,
        src: int | None,
        *,
        tag: int = 0,
        async_op: bool = False,
        timeout: float = 0.0,
    ) -> Work | Any:
        """Receives the next message of rank ``src`` with this tag, of this size and dtype.

        ``src=None`` takes it from whichever rank it comes; with ``async_op=True`` the work's
        ``source`` says from which it came.
        """
        work = self._calls.recv(tensor, src, tag=tag, timeout=timeout, async_op=async_op)
        return None if work is None else self._handle(work, [tensor])

    @quick
    def barrier(self, *, async_op: bool = False, timeout: float = 0.0) -> Work | Any:
        """Returns when every rank has called it. A ``Timeout`` names the ranks that did not."""
        work = self._calls.barrier(timeout=timeout, async_op=async_op)
        return None if work is None else self._handle(work, [])

    monitored_barrier = barrier

    # ---- memory, groups, life ----------------------------------------------------------------

    @property
    @abstractmethod
    def backend(self) -> str:
        """What moves the bytes: "native", "nccl", "cuda", "cupy", "torch gloo", ..."""

    @property
    @abstractmethod
    def transport(self) -> str:
        """How the ranks reach, or met, each other."""

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Whether ``close()`` was called."""

    @abstractmethod
    def empty(self, *shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor where this communicator works, contents as they are."""

    @abstractmethod
    def split(self, color: int | None, key: int = 0) -> Collectives[Work] | None:
        """Ranks with the same ``color`` form a communicator of the same kind, ordered by ``key``;
        every rank calls it, and None takes part and gets None."""

    def shrink(self, timeout: float = 0.0) -> Collectives[Work]:
        """After ``PeerLost``: a communicator of the ranks that live, where the kind has it."""
        raise Unsupported(
            f"{type(self).__name__} cannot be shrunk: only dpcore's own core on CPUs, "
            "dpcore.init(backend='native'), goes on without the ranks that died. Start the job "
            "again with the ranks that remain"
        )

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """What ran so far, or what carries the bytes; empty where nothing is counted."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Gives up: the waits of all ranks end with an error."""

    @abstractmethod
    def close(self) -> None:
        """Leaves. Later calls raise ``Error``. Closing twice is fine."""

    @property
    def _place(self) -> str:
        return self.backend

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return (
            f"<{type(self).__name__} rank {self.rank} of {self.world_size}, {self._place}{state}>"
        )


if TYPE_CHECKING:

    def _is_part(whole: Collectives[Any]) -> GradientGroup:
        return whole
