"""``LaunchControl``: the calls of a launch schedule, in a step and in ``dpcore simulate``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


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
