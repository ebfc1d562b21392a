"""The contract of a communicator, whatever carries the bytes.

``Collectives`` (collectives.py) has all of its methods. ``Communicator`` (dpcore's core, on CPUs)
has all of what they can do, and so has ``DeviceCommunicator`` (GPUs), except for tags. Three
adapters state what else they lack: ``MpiCommunicator`` (an MPI library through mpi4py),
``TorchCommunicator`` (a process group of torch) and ``CupyCommunicator`` (CuPy's NCCL).
``GradientGroup`` is the part that ``DataParallel`` needs; an object of your own may have only that
part. tests/comm/test_contract_of_communicators.py runs the same checks over each kind.

**Order.** All ranks call the same operations in the same order. Messages (``send``, ``recv``) are
matched by sender and tag instead.

**Options.** Every call takes ``async_op`` and ``timeout``. The others have a meaning for some:

``op``         sum, mean, prod, min, max, band, bor, bxor, or premul_sum with this rank's
               ``factor``; also as others write them: "AVG", ``torch.distributed.ReduceOp.SUM``,
               ``mpi4py.MPI.SUM``.
``sizes``      elements in each rank's part, one number per rank, when the parts differ.
``async_op``   return a handle instead of waiting.
``timeout``    seconds, instead of the communicator's; 0 stands for the communicator's.
``algorithm``  a name, or one of your own: a function of the number of ranks that returns moves,
               ``"file.py:function"``, or a ``dpcore.Schedule``.
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
until that has completed: nothing may write to it, nor read what is being written. With ``async_op``
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

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from dpcore.errors import Error

Operator = Any  # str | torch.distributed.ReduceOp | mpi4py.MPI.Op
Algorithm = Any  # str | (int) -> moves | dpcore.Schedule | None
Sizes = Sequence[int] | None


class Capabilities(NamedTuple):
    """What a kind of communicator has beyond moving data. Each is a question that a caller asks."""

    core: bool = False  # the reducer may call its compiled core, ``_native``, without Python
    ordered: bool = False  # it can add in rank order, for ``deterministic=True``
    compares_layouts: bool = False  # ranks compare ``layout``, and it numbers the models over it
    counts: bool = False  # ``stats()`` has counters
    traces: bool = False  # ``dpcore.trace()`` can record it
    own_memory: bool = False  # ``empty()`` gives memory on its device that needs no extra copy
    silent_in_profiler: bool = False  # its caller tells torch's profiler what it runs
    on_processors: bool = False  # operations take time of the processors that compute


class Pending(Protocol):
    """An operation to wait for."""

    def wait(self) -> Any:
        """Returns when it is complete; raises what went wrong."""


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


def end_for_all(group: Any, problem: Error) -> None:
    """Gives the other ranks, which wait for this one, the same error, if the group can."""
    if hasattr(group, "abort"):
        with contextlib.suppress(Error):
            group.abort(str(problem))
