"""Collectives: the Python face of a communicator.

The contract, which other communicators keep as well, is in protocol.py: options, errors, threads,
and what owns a buffer when. This one takes contiguous torch CPU tensors and anything with the
buffer protocol, numpy arrays (in C order) first of all. Elements without arithmetic here (float8,
unsigned integers of 16 bits and more) are moved as integers of their size, and reductions refuse
them.

The memory stays where it is until the operation is complete: a bytearray in flight raises
``BufferError`` when it is resized, and a tensor may be given other memory (``tensor.data =
other``). What cannot be prevented is ``tensor.untyped_storage().resize_(0)`` and
``array.resize(..., refcheck=False)``: they free memory that the operation still uses, so wait for
it first.

``algorithm`` is a name (``"ring"``, ``"two_shot"``, ...; with ``"/moves"`` behind it the list of
moves is executed literally) or one of your own: a function of the number of ranks, which returns
moves, ``"file.py:function"``, or a ``dpcore.Schedule``. It is proved when it is first named.

A rank that only gives (the root of a small broadcast, say) does not wait for those that take; see
``docs/decisions/0007-senders-do-not-wait-for-receivers.md``. ``barrier`` waits for everybody.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from dpcore.comm.communicators.checks import check_groups, check_integer, check_is
from dpcore.comm.communicators.collectives import Collectives
from dpcore.comm.communicators.protocol import Capabilities
from dpcore.comm.communicators.work import Work
from dpcore.errors import Unsupported, raise_unheard

if TYPE_CHECKING:
    import torch

    from dpcore import _C
    from dpcore.comm.communicators.explain import Explanation


class Communicator(Collectives[Work]):
    """A group of ranks. Made by ``dpcore.init()``, ``split()`` or ``shrink()``, not directly."""

    _capabilities: ClassVar[Capabilities] = Capabilities(*[True] * len(Capabilities._fields))
    _native: _C.Communicator
    _handle = Work

    def __init__(self, native: _C.Communicator, costs_source: str = "", link: str = "") -> None:
        self._native = self._calls = native
        self._costs_source = costs_source
        self._own: Any = None  # an algorithm of the program's, where a call names none
        self._link = link
        self.rank: int = native.rank
        self.world_size: int = native.world_size
        # Numbers for the models that are wrapped over it, see dpcore/ddp/wrapper/model_group.py.
        self._wrapped_models = self._copied_models = 0
        # What this group and those split from the same one have in common, and where it was split.
        self._family, self._splits = object(), 0
        self._lineage: tuple[int, ...] = ()
        # Of one that shrink() returned: the ranks that its members had before, and how many
        # operations all of them had completed there. Those on devices have no shrink().
        self.survivors: tuple[int, ...] = tuple(getattr(native, "survivors", ()))
        self.completed_before: int = getattr(native, "completed_before", 0)
        # Made by init(join=True): with what options the one of the job shall be made.
        self._joins_with: dict[str, Any] | None = None
        # Told of the communicator that takes the place of this one.
        self._succeeded_by: Callable[[Communicator, Communicator], None] | None = None

    # ---- memory, groups, life ----------------------------------------------------------------

    def empty(self, *shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor in the arena: memory that the other ranks of the host can reach.

        Collectives on it move no byte that the result does not need. It may outlive the
        communicator. The contents are not initialised.

        >>> gradients = comm.empty(1024, 1024, dtype=torch.float32)     # doctest: +SKIP
        """
        import torch

        extents = shape[0] if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
        tensor: torch.Tensor = self._native.empty(
            [check_integer(extent, "shape", 0, 2**63 - 1) for extent in extents],
            torch.get_default_dtype() if dtype is None else dtype,
        )
        return tensor

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Makes groups: ranks with the same ``color`` form a new communicator, ordered by ``key``.

        Every rank must call it; ``color=None`` takes part and gets None. A function that was given
        to ``init`` as algorithm is called again for the size of the group.
        """
        check_groups(color, key)
        native = self._native.split(-1 if color is None else color, key)
        self._splits += 1
        if color is None or native is None:
            return None
        group = self._beside(native)
        if self._own is not None:
            group._run_by_default(self._own)
        group._family, group._lineage = self._family, (*self._lineage, self._splits, color)
        return group

    def shrink(self, timeout: float = 0.0) -> Communicator:
        """After ``PeerLost`` or ``Timeout``: a communicator of the ranks that live, in their order.

        All of them call it. It waits for each rank that is not known to be dead or to have left,
        ``timeout`` seconds at most (0: the communicator's), and goes on without those that do not
        come; such a rank gets ``PeerLost`` when it comes later. Tensors and models of the old
        communicator stay with that one: make them anew. ``survivors`` of the result has the old
        ranks, ``completed_before`` the number of operations that all of them had completed.
        ``docs/failures.md`` says what is promised.

        >>> try:                                                        # doctest: +SKIP
        ...     comm.all_reduce(gradients)
        ... except dpcore.PeerLost:
        ...     comm = comm.shrink()
        """
        check_is("a number", timeout=timeout)
        if not timeout >= 0:
            raise Unsupported(
                f"timeout {timeout!r}: a wait for another rank needs 0 or more seconds"
            )
        return self._followed_by(self._native.shrink(timeout))

    def _grow(self, guests: int, door: Any, timeout: float) -> Communicator:
        """At the same place on all ranks: these, and behind them as many ranks that join.

        ``door`` is where they knocked (dpcore/comm/launch/door.py), or None on the other ranks.
        Without them if they do not come, and as ``shrink`` if ranks have died.
        """
        invite, are_gone = (door.invite, door.are_gone) if door else (None, None)
        return self._followed_by(self._native.grow(guests, invite, are_gone, timeout))

    def _followed_by(self, native: Any) -> Communicator:
        rest = self._beside(native)
        if self._own is not None:
            rest._run_by_default(self._own)
        rest._succeeded_by = self._succeeded_by
        if self._succeeded_by is not None:
            self._succeeded_by(self, rest)
        return rest

    def _beside(self, native: Any) -> Communicator:
        """Another group of the same kind."""
        return Communicator(native, self._costs_source, self._link)

    def _run_by_default(self, algorithm: Any) -> None:
        """Lets calls of its collective that name no algorithm run this one of the program's; the
        same on all ranks, which have called nothing yet. A rank that is alone runs none."""
        from dpcore.comm.communicators.own_schedules import compiled

        self._own = algorithm
        if self.world_size == 1:
            return
        try:
            self._native.run_by_default(compiled(algorithm, self.world_size))
        except BaseException:
            self._native.close()
            raise

    @property
    def _on_host(self) -> Communicator:
        """The same ranks, for memory of the host."""
        return self

    def stats(self) -> dict[str, Any]:
        """What ran so far, by collective and path: operations, bytes, bytes read from and written
        to other ranks' memory; the bytes sent as messages by memory and by the network; and the
        size of the arena."""
        result: dict[str, Any] = self._native.stats()
        return result

    def explain(self, nbytes: int) -> Explanation:
        """Which algorithm would run for each collective of ``nbytes``, and why. Print it.

        ``nbytes`` counts the whole buffer, or all ranks' parts together.
        """
        from dpcore.comm.communicators.explain import explain

        nbytes = check_integer(nbytes, "nbytes", 0, 2**63 - 1)
        return explain(self._native, nbytes, self._costs_source)

    def abort(self, reason: str) -> None:
        """Gives up: the waits of all ranks end with ``PeerLost`` and this text."""
        check_is("a string", reason=reason)
        self._native.abort(reason)

    def close(self) -> None:
        """Waits for what is in flight and leaves. Later calls raise. Closing twice is fine.

        Raises what went wrong and was not raised before: an operation that no call waited for, or
        one that did not end within ``timeout``. While another exception is on its way (in a
        ``finally``) that one goes on, with this as a note.
        """
        self._native.close()
        raise_unheard(self._native.unacknowledged_failure())

    @property
    def closed(self) -> bool:
        """Whether ``close()`` or ``finalize()`` was called."""
        return self._native.closed

    @property
    def backend(self) -> str:
        """What moves the bytes: ``"native"`` is dpcore's own core."""
        return "native"

    @property
    def transport(self) -> str:
        """How its ranks reach each other: ``"shm"`` (all share memory), ``"tcp"``, ``"shm+tcp"``
        (memory within a host, TCP between hosts) or ``"inproc"`` (ranks are threads)."""
        return self._native.transport

    @property
    def hosts(self) -> list[int]:
        """By rank: equal numbers for ranks that share memory."""
        return self._native.hosts

    @property
    def _sharers(self) -> int:
        """How many ranks may run on the processors of this one, itself among them."""
        return self._native.sharers

    def _latency_loop(self, nbytes: int, iterations: int) -> float:
        """Seconds per all-reduce in the arena, measured without Python in between."""
        return self._native.latency_loop(nbytes, iterations)

    @property
    def _place(self) -> str:
        return self.transport
