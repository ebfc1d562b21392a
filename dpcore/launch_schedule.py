"""``LaunchSchedule``: decide in Python when gradients are sent, and who waits for them where.

    class WhenAllIsThere(dpcore.LaunchSchedule):
        def backward_end(self, control):
            for bucket in range(control.buckets):
                control.launch(bucket)
            control.wait_for_all()

    model = dpcore.DataParallel(model, schedule=WhenAllIsThere())

The schedules that come with dpcore do the same in C++ (csrc/reducer/launch_schedule.cpp).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from dpcore.communicator import Communicator

if TYPE_CHECKING:
    from dpcore._C import LaunchControl
    from dpcore.gradient_group import GradientGroup

_EVENTS = ("gradient_ready", "bucket_ready", "backward_end", "forward_begin", "optimizer_step")


class LaunchSchedule:
    """Subclass it and define the methods of the events you want; the others cost nothing.

    Every bucket has to be launched by the end of backward. What is not waited for by then has to
    be waited for before the optimizer uses the gradients. Buckets are numbered in the order in
    which they get complete.
    """

    def caps(self, wanted: Sequence[int]) -> Sequence[int]:
        """Bytes of the first, second, ... bucket; the last is for all further. ``wanted`` is what
        the user of DataParallel has asked for."""
        return wanted

    def order(self, buckets: int) -> Sequence[int]:
        """In which order buckets are launched. It must be the same on all ranks; a bucket that
        is launched before its turn is held back until then."""
        return range(buckets)

    def is_exact(self) -> bool:
        """False when communication is left out, for bounds."""
        return True

    def gradient_ready(self, control: LaunchControl, gradient: int) -> None:
        """A gradient is in its bucket. Gradients are numbered as the module's parameters."""

    def bucket_ready(self, control: LaunchControl, bucket: int) -> None:
        """The last gradient of a bucket is there."""

    def backward_end(self, control: LaunchControl) -> None:
        """All gradients are there."""

    def forward_begin(self, control: LaunchControl, module: int) -> None:
        """The forward of a module with parameters of its own begins, while buckets are in flight.
        Modules are numbered as ``modules()`` finds them."""

    def optimizer_step(self, control: LaunchControl) -> None:
        """An optimizer is about to step, while buckets are in flight."""

    def listens_to(self) -> list[str]:
        """The events whose methods were defined."""
        mine = type(self)
        return [
            name for name in _EVENTS if getattr(mine, name) is not getattr(LaunchSchedule, name)
        ]


def automatic_schedule(group: GradientGroup) -> str:
    """Communication in the background of backward needs a processor. When each rank computes with
    one thread and there is a rank for every processor, it would only take turns with backward, and
    doing it at the end, on the thread that waits anyway, costs less (docs/decisions/0011)."""
    processors = len(os.sched_getaffinity(0))
    busy = torch.get_num_threads() == 1 and group.world_size >= processors
    return "sequential" if busy and isinstance(group, Communicator) else "bucketed"
