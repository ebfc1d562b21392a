"""The contract of a communicator, whoever carries the bytes.

``Collectives`` is all of it. Five classes keep it: ``Communicator`` (dpcore's core, on CPUs),
``DeviceCommunicator`` (GPUs), ``MpiCommunicator`` (an MPI library through mpi4py),
``TorchCommunicator`` (a process group of torch) and ``CupyCommunicator`` (CuPy's NCCL).
``GradientGroup`` is the part that ``DataParallel`` needs; an object of your own may have only that
part. mypy checks each class against its protocol, and tests/comm/test_contract_of_communicators.py
runs the same checks over each of them.

**Order.** All ranks call the same operations in the same order. Messages (``send``, ``recv``) are
matched by sender and tag instead.

**Options.** Every call takes ``async_op`` and ``timeout``. The others have a meaning for some:

``op``         sum, mean, prod, min, max, band, bor, bxor, or premul_sum with this rank's
               ``factor``; also as others write them: "AVG", ``torch.distributed.ReduceOp.SUM``,
               ``mpi4py.MPI.SUM``.
``sizes``      elements in each rank's part, one number per rank, when the parts differ.
``async_op``   return a handle instead of waiting.
``timeout``    seconds, instead of the communicator's; 0 stands for the communicator's.
``algorithm``  a name, or a ``dpcore.Schedule`` of your own.
``priority``   higher goes first when several operations are in flight. It is a hint: what runs in
               the order of a stream stays in that order.
``layout``     a number that must agree on all ranks, compared before any data is touched.

A kind that lacks an option raises ``Unsupported``, which names the option, unless it has its
default value. Nothing else is a keyword: that is a ``TypeError``.

**Errors.** A mistake in the arguments is raised by the call, also when it is asynchronous, and
nothing has been sent: the communicator goes on. ``TypeError``: not a buffer, or not a number.
``ValueError``: a root that is not a rank, an ``output`` that is missing or should be None.
``Unsupported`` (which is a ``ValueError``): everything that has no meaning or no implementation
here, such as an operator that the dtype does not have or parts that do not fit. A closed
communicator raises ``Error``. What happens later (``PeerLost``, ``Timeout``, ``Mismatch``) breaks
the communicator; a group of torch raises torch's own errors for these.

**Buffers.** A buffer is a contiguous tensor of torch or, on the host, a numpy array in C order;
dpcore's core takes whatever has the buffer protocol. It belongs to the operation from the call
until that has completed: nobody may write to it, nor read what is being written. With ``async_op``
the communicator keeps it alive, so the caller may drop it, and the handle too. On a device,
``wait()`` orders the result before what the thread gives to its current stream from then on, and
does not block the thread.

**Threads.** Any thread may call, one at a time: the order of calls is what ranks must have in
common, and two threads that call at once have none. Handles may be waited for on other threads.
``abort`` may be called at any time, from any thread.

**Traces.** ``dpcore.trace()`` records communicators whose ``Capabilities`` say ``traces``: of each
operation its name, bytes, path and algorithm, when it began and ended, and what it waited for; of
each thread, when it sat in a call or in ``wait()``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from dpcore.comm.communicators.call_options import Sizes

if TYPE_CHECKING:
    import torch
    from typing_extensions import Unpack

    from dpcore.comm.communicators.call_options import (
        Combining,
        CombiningParts,
        CombiningWhole,
        Exchanging,
        GatheringParts,
        Meeting,
        Message,
        Parts,
        Whole,
    )

Operator = Any  # str | torch.distributed.ReduceOp | mpi4py.MPI.Op


class Capabilities(NamedTuple):
    """What a kind of communicator has beyond moving data. Each is a question that somebody asks."""

    core: bool = False  # the reducer may call its compiled core, ``_native``, without Python
    ordered: bool = False  # it can add in rank order, for ``deterministic=True``
    compares_layouts: bool = False  # ranks compare ``layout``, and it numbers the models over it
    counts: bool = False  # ``stats()`` has counters
    traces: bool = False  # ``dpcore.trace()`` can record it
    own_memory: bool = False  # ``empty()`` gives memory on its device that needs no extra copy
    silent_in_profiler: bool = False  # somebody else has to tell torch's profiler what it runs
    on_processors: bool = False  # operations take time of the processors that compute


class Pending(Protocol):
    """An operation that somebody will wait for."""

    def wait(self) -> Any:
        """Returns when it is complete; raises what went wrong."""


class Operation(Protocol):
    """What ``async_op=True`` returns."""

    def wait(self, timeout: float | None = None) -> None:
        """Returns when the result may be used; raises what went wrong. ``timeout``: seconds."""

    def is_completed(self) -> bool:
        """Whether it has ended, well or not."""


@runtime_checkable
class GradientGroup(Protocol):
    """Ranks that average gradients. All methods work in place on flat, contiguous tensors."""

    rank: int
    world_size: int

    def all_reduce(self, tensor: Any, op: str, *, async_op: bool) -> Pending | None:
        """``op``: "mean", "sum" or "max"."""

    def broadcast(self, tensor: Any, root: int) -> Any:
        """From ``root`` to all."""

    def all_gather(self, output: Any, input: Any, *, sizes: Sizes = None) -> Any:
        """Everybody's input, one after the other; ``sizes`` when they differ."""


class Collectives(Protocol):
    """A communicator. The docstring of this module has the rules that all methods share."""

    _capabilities: ClassVar[Capabilities]
    rank: int
    world_size: int

    @property
    def backend(self) -> str:
        """Who moves the bytes: "native", "nccl", "cuda", "cupy", "torch gloo", ..."""

    @property
    def transport(self) -> str:
        """How the ranks reach, or met, each other."""

    @property
    def closed(self) -> bool:
        """Whether ``close()`` was called."""

    def all_reduce(
        self,
        tensor: Any,
        op: Operator = "sum",
        *,
        async_op: bool = False,
        **options: Unpack[CombiningWhole],
    ) -> Operation | None:
        """Combines ``tensor`` over all ranks, in place: all hold the same result."""

    def broadcast(
        self, tensor: Any, root: int = 0, *, async_op: bool = False, **options: Unpack[Whole]
    ) -> Operation | None:
        """Copies ``tensor`` of rank ``root`` to all ranks."""

    def reduce(
        self,
        tensor: Any,
        root: int = 0,
        op: Operator = "sum",
        *,
        async_op: bool = False,
        **options: Unpack[Combining],
    ) -> Operation | None:
        """Like ``all_reduce``, but only ``root`` gets the result; the others keep their data."""

    def reduce_scatter(
        self,
        output: Any,
        input: Any,
        op: Operator = "sum",
        *,
        async_op: bool = False,
        **options: Unpack[CombiningParts],
    ) -> Operation | None:
        """Combines ``input`` and leaves the r-th part of the result in rank r's ``output``."""

    def all_gather(
        self, output: Any, input: Any, *, async_op: bool = False, **options: Unpack[GatheringParts]
    ) -> Operation | None:
        """Puts the ``input`` of all ranks one after the other into everybody's ``output``."""

    def gather(
        self,
        output: Any | None,
        input: Any,
        root: int = 0,
        *,
        async_op: bool = False,
        **options: Unpack[Parts],
    ) -> Operation | None:
        """``all_gather`` for one rank: ``output`` is None on the others."""

    def scatter(
        self,
        output: Any,
        input: Any | None,
        root: int = 0,
        *,
        async_op: bool = False,
        **options: Unpack[Parts],
    ) -> Operation | None:
        """Gives the r-th part of ``root``'s ``input`` to rank r; ``input`` is None elsewhere."""

    def all_to_all(
        self, output: Any, input: Any, *, async_op: bool = False, **options: Unpack[Exchanging]
    ) -> Operation | None:
        """Sends the d-th part of ``input`` to rank d. With uneven parts both lists are needed."""

    def send(
        self, tensor: Any, dst: int, *, async_op: bool = False, **options: Unpack[Message]
    ) -> Operation | None:
        """Sends to rank ``dst``. Returns when ``tensor`` may be changed again."""

    def recv(
        self, tensor: Any, src: int, *, async_op: bool = False, **options: Unpack[Message]
    ) -> Operation | None:
        """Receives the next message of rank ``src`` with this tag, of this size and dtype."""

    def barrier(self, *, async_op: bool = False, **options: Unpack[Meeting]) -> Operation | None:
        """Returns when every rank has called it."""

    def empty(self, *shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor where this communicator works, contents as they are."""

    def split(self, color: int | None, key: int = 0) -> Collectives | None:
        """Ranks with the same ``color`` form a communicator of the same kind, ordered by ``key``;
        every rank calls it, and None takes part and gets None."""

    def stats(self) -> dict[str, Any]:
        """What ran so far, or what carries the bytes; empty where nobody counts."""

    def abort(self, reason: str) -> None:
        """Gives up: the waits of all ranks end with an error."""

    def close(self) -> None:
        """Leaves. Later calls raise ``Error``. Closing twice is fine."""


def capabilities_of(group: object) -> Capabilities:
    """Those of the group's class: an object of one's own that passes calls on has none."""
    found: Capabilities = getattr(type(group), "_capabilities", Capabilities())
    return found


def core_of(group: Any) -> Any:
    """What the reducer calls: the compiled communicator inside ``group``, or a process group of
    torch, else ``group`` itself."""
    if capabilities_of(group).core:
        return group._native
    return getattr(group, "_compiled", group)


def check_open(group: Any) -> None:
    """Raises what a call of ``group`` would: a reducer that calls a process group of torch does not
    see that the communicator around it was closed."""
    if hasattr(group, "_compiled"):
        group._check_open()


if TYPE_CHECKING:

    def _is_part(whole: Collectives) -> GradientGroup:
        return whole
