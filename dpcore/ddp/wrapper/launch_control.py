"""``LaunchControl``: what a launch schedule may ask for, in a step and in ``dpcore simulate``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class LaunchControl(Protocol):
    """Comes with each event of a ``LaunchSchedule``, and is valid during that event only."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def buckets(self) -> int:
        """How many buckets there are; they are numbered in the order in which they get ready."""

    @property
    def in_flight(self) -> int:
        """Operations that this rank has sent and that are not complete."""

    @property
    def elapsed_ms(self) -> float:
        """Milliseconds since the first gradient of this backward came; ranks differ in it."""

    def max_over_ranks(self, values: Sequence[float]) -> list[float]:
        """The largest value of any rank, place by place, so that ranks may decide alike by what
        each has measured. All ranks have to call it, each after the same launches: at
        ``backward_end``, say, and not in ``bucket_ready``."""

    def bytes(self, bucket: int) -> int:
        """How many bytes the bucket's gradients have. The same on all ranks."""

    def is_complete(self, bucket: int) -> bool:
        """Whether all gradients of the bucket are there, so that it may be launched."""

    def bucket_of(self, gradient: int) -> int | None:
        """The bucket that a gradient travels in; None for sparse ones."""

    def gradients_of_module(self, module: int) -> list[int]:
        """The gradients of a module's own parameters, without those of its children."""

    def launch(
        self, bucket: int | Sequence[int], priority: int = 0, background: bool = True
    ) -> None:
        """Sends a bucket whose gradients are there, after those before it in ``order()``. Several
        neighbours, such as ``[3, 4]``, go as one operation; which ones must be the same on all
        ranks. Higher priorities overtake; without ``background`` only the thread that waits drives
        it."""

    def skip(self, bucket: int) -> None:
        """Leaves the bucket as it is: no communication, and wrong results."""

    def wait(self, bucket: int) -> None:
        """Returns when the bucket's gradients are averages."""

    def wait_for_all(self) -> None:
        """``wait()`` for every bucket."""

    def is_over(self, bucket: int) -> bool:
        """Whether ``wait()`` would return at once."""

    # With more phases than one: launch() is of the next phase, wait() for the current one. An
    # all_gather of gradients may be launched at backward_end behind its reduce_scatter, without a
    # wait; it begins when that is over, and wait() is then for both.

    def update(self, bucket: int | Sequence[int]) -> None:
        """The optimizer's step for a bucket whose next phase is ``update``, or for several in one
        call of the optimizer. Does nothing for those that have it behind them, or if no step is
        recorded."""

    def order_of_need(self) -> list[int]:
        """Buckets as the next forward needs them, learned in the first forward."""

    def next_phase(self, bucket: int) -> str | None:
        """The phase after the first that a bucket is in, or enters next; None after the last."""
