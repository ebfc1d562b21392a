"""``LaunchSchedule``: decides in Python when gradients are sent and where they are awaited; and
``LaunchControl``, the calls by which it does so, in a step and in ``dpcore simulate``.

    class WhenAllIsThere(dpcore.LaunchSchedule):
        def backward_end(self, control):
            for bucket in range(control.buckets):
                control.launch(bucket)
            control.wait_for_all()

    model = dpcore.DataParallel(model, schedule=WhenAllIsThere())
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

EVENTS = (
    "gradient_ready",
    "bucket_ready",
    "bucket_complete",
    "slice_complete",
    "backward_end",
    "forward_begin",
    "optimizer_step",
)


class LaunchSchedule:
    """Subclass it and define the methods of the events you want; the others cost nothing.

    Every bucket must be launched by the end of backward. Backward then waits for all of them, since
    programs read gradients before the optimizer does. A schedule that defines ``optimizer_step``
    defers that wait: buckets may stay in flight until an optimizer of the model steps. A program
    that uses a gradient earlier waits there for all of them. Waiting only in ``forward_begin`` is
    an ``Error``: the optimizer has stepped by then.

    Buckets are numbered in the order in which they become ready. Methods of your own need a leading
    underscore, so that a misspelt event is not mistaken for one of them.
    """

    def phases(self) -> Sequence[str]:
        """The phases of each bucket: ``["all_reduce"]``, after which the program steps; or one of
        ``["all_reduce", "update"]``, ``["reduce_scatter", "all_gather", "update"]`` and
        ``["reduce_scatter", "update", "all_gather"]``, which end under the next forward and need
        ``dpcore.DistributedOptimizer``. See docs/own_schedule.md."""
        return ["all_reduce"]

    def whole_buckets(self) -> int:
        """How many buckets at a time have memory for whole gradients; for the others each rank
        keeps only its part of the averages. 0: all. Requires phases that gather parameters."""
        return 0

    def caps(self, wanted: Sequence[int]) -> Sequence[int]:
        """Bytes of the first, second, ... bucket; the last is for all further buckets. ``wanted``
        are the sizes that the user of DataParallel asked for."""
        return wanted

    def order(self, buckets: int) -> Sequence[int]:
        """The order in which buckets are sent, the same on all ranks. A bucket that is launched
        before its turn is held back until then."""
        return range(buckets)

    def slices(self, sizes: Sequence[int]) -> Sequence[tuple[int, int, int]]:
        """Where buckets are cut: ``(bucket, begin, end)`` of each slice, in bytes of the bucket,
        in the order in which slices are sent, the same on all ranks. ``sizes``: the bytes of each
        bucket. Each slice is an operation of its own, and the bucket is averaged when all of them
        are. Slices must cover every bucket without overlap. Requires phases that begin with
        ``all_reduce``. Empty: buckets are sent whole, as ``order()`` says."""
        return []

    def is_exact(self) -> bool:
        """False if the schedule uses ``control.skip`` to measure a bound."""
        return True

    def gradient_ready(self, control: LaunchControl, gradient: int) -> None:
        """A gradient is in its bucket. Gradients are numbered as the module's parameters."""

    def bucket_ready(self, control: LaunchControl, bucket: int) -> None:
        """The last gradient of a bucket has arrived."""

    def bucket_complete(self, control: LaunchControl, bucket: int) -> None:
        """The gradients of a bucket are averages. This is noticed when a gradient arrives and in
        waits, at different times on each rank, so launch only the next bucket in ``order()``."""

    def slice_complete(self, control: LaunchControl, bucket: int, slice: int) -> None:
        """A slice of a bucket is averaged; noticed as ``bucket_complete`` is. Launch only the next
        slice in ``slices()``."""

    def backward_end(self, control: LaunchControl) -> None:
        """All gradients have arrived."""

    def forward_begin(self, control: LaunchControl, module: int) -> None:
        """The forward of a module with its own parameters begins while buckets are in flight: no
        optimizer has stepped since backward. Modules are numbered in the order of ``modules()``."""

    def optimizer_step(self, control: LaunchControl) -> None:
        """An optimizer is about to step while buckets are in flight. After this event, dpcore waits
        for the remaining buckets before the optimizer continues."""

    def listens_to(self) -> list[str]:
        """The events whose methods the subclass defines."""
        return [
            name
            for name in EVENTS
            if getattr(getattr(self, name), "__func__", None) is not getattr(LaunchSchedule, name)
        ]


class LaunchControl(Protocol):
    """The argument of each event of a ``LaunchSchedule``, valid only during that event."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def buckets(self) -> int:
        """The number of buckets; they are numbered in the order in which they become ready."""

    @property
    def in_flight(self) -> int:
        """The number of operations that this rank has launched and that are not complete."""

    @property
    def elapsed_ms(self) -> float:
        """Milliseconds since the first gradient of this backward arrived. It differs between
        ranks."""

    def max_over_ranks(self, values: Sequence[float]) -> list[float]:
        """The element-wise maximum over ranks, so that ranks can make the same decision from
        their measurements. All ranks must call it after the same launches: in ``backward_end``,
        for example, but not in ``bucket_ready``."""

    def bytes(self, bucket: int) -> int:
        """The size of the bucket's gradients in bytes, the same on all ranks."""

    def is_complete(self, bucket: int) -> bool:
        """Whether the bucket has all its gradients, so that it may be launched."""

    def bucket_of(self, gradient: int) -> int | None:
        """The bucket of a gradient; None for sparse gradients."""

    def gradients_of_module(self, module: int) -> list[int]:
        """The gradients of a module's own parameters, without those of its children."""

    def launch(
        self,
        bucket: int | Sequence[int],
        priority: int = 0,
        background: bool = True,
        algorithm: Any = None,
        slice: int | None = None,
    ) -> None:
        """Sends a ready bucket, once those before it in ``order()`` are sent. Neighbours such as
        ``[3, 4]`` form one operation; all ranks must combine the same ones. A higher priority
        overtakes lower ones. Without ``background`` the operation only advances in a thread that
        waits. ``algorithm``: a name, or one of your own, as ``Communicator.all_reduce`` takes it,
        for the collective of the phase; the same on all ranks. None: the communicator's.
        ``slice``: only this one of the bucket's slices; None: all that are not launched yet."""

    def slices(self, bucket: int) -> list[int]:
        """The bytes of each slice of a bucket, in the order of ``LaunchSchedule.slices()``; of a
        bucket that is not cut, one number."""

    def skip(self, bucket: int) -> None:
        """Does not communicate the bucket, so results are wrong. For measuring a bound."""

    def wait(self, bucket: int) -> None:
        """Waits until the bucket's gradients are averages."""

    def wait_for_all(self) -> None:
        """``wait()`` for every bucket."""

    def is_over(self, bucket: int) -> bool:
        """Whether ``wait()`` would return at once."""

    # With several phases, launch() starts the next phase and wait() waits for the current one. An
    # all_gather of gradients may be launched at backward_end without waiting for its
    # reduce_scatter: it begins when that is complete, and wait() then waits for both.

    def update(self, bucket: int | Sequence[int]) -> None:
        """Applies the optimizer's step to a bucket whose next phase is ``update``, or to several
        in one call of the optimizer. Does nothing for buckets that are already updated, or if no
        step is recorded."""

    def order_of_need(self) -> list[int]:
        """The buckets in the order in which forward needs them, learned in the first forward."""

    def next_phase(self, bucket: int) -> str | None:
        """The later phase that a bucket is in or enters next; None after the last."""
