"""``LaunchSchedule``: decides in Python when gradients are sent and where they are awaited.

    class WhenAllIsThere(dpcore.LaunchSchedule):
        def backward_end(self, control):
            for bucket in range(control.buckets):
                control.launch(bucket)
            control.wait_for_all()

    model = dpcore.DataParallel(model, schedule=WhenAllIsThere())

dpcore's own schedules do the same in C++ (csrc/reducer/launch/launch_schedule.cpp); their twins in
Python are in dpcore/reference/launches.py.
"""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Sequence
from types import FunctionType
from typing import TYPE_CHECKING

from dpcore.errors import Unsupported
from dpcore.reference.launches import ACROSS_STEPS, EVENTS, EXACT, SCHEDULES, caps_of

if TYPE_CHECKING:
    from dpcore.ddp.wrapper.launch_control import LaunchControl

NAMES = ("auto", *SCHEDULES, *ACROSS_STEPS)
_SHARDED = ("zero", "zero3", "fsdp", "sharded", "fully_sharded")


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


def goes_across_steps(schedule: str | LaunchSchedule) -> bool:
    """Whether the schedule's phases end under the next forward."""
    if isinstance(schedule, str):
        return schedule in ACROSS_STEPS
    return "update" in schedule.phases()


def keeps_caps(schedule: str | LaunchSchedule) -> bool:
    """Whether buckets get the requested sizes."""
    wanted = [1 << 20, 25 << 20]
    caps = caps_of(schedule, wanted) if isinstance(schedule, str) else schedule.caps(wanted)
    return list(caps) == wanted


def checked(schedule: str | LaunchSchedule) -> str | LaunchSchedule:
    """Checks the schedule and returns it, with "auto" replaced by DPCORE_SCHEDULE if that is set.
    Warns of a schedule that averages nothing."""
    if isinstance(schedule, str) and schedule == "auto":
        schedule = os.environ.get("DPCORE_SCHEDULE", "") or "auto"
        if schedule not in NAMES:
            raise Unsupported(f"DPCORE_SCHEDULE={schedule}: it must be one of {', '.join(NAMES)}")
    if isinstance(schedule, str) and schedule in _SHARDED:
        raise Unsupported(
            f"schedule='{schedule}': there is 'zero1', which shards the optimizer's state, and "
            "'zero2', which shards gradients as well. To shard parameters, too, torch's FSDP2 "
            "runs over dpcore: init_process_group('dpcore'), then "
            "torch.distributed.fsdp.fully_shard(module)"
        )
    if isinstance(schedule, str):
        is_exact = schedule not in SCHEDULES or schedule in EXACT
        name = schedule
    elif isinstance(schedule, type):
        name = schedule.__name__
        raise Unsupported(f"schedule: {name} is a class; pass an instance, schedule={name}()")
    elif not hasattr(schedule, "listens_to"):
        raise Unsupported(
            f"schedule: expected a name or a dpcore.LaunchSchedule, not a {type(schedule).__name__}"
        )
    else:
        _check_methods(type(schedule))
        is_exact, name = schedule.is_exact(), type(schedule).__name__
    if not is_exact:
        warnings.warn(
            f"schedule '{name}' leaves out communication: gradients are not averaged and ranks "
            "drift apart. It is a bound to compare with, not a way to train",
            stacklevel=3,
        )
    return schedule


def asked_for(schedule: str | LaunchSchedule) -> str:
    """The schedule of the program and DPCORE_SCHEDULE, as a text that ranks compare."""
    if isinstance(schedule, str) and schedule == "auto":
        said = os.environ.get("DPCORE_SCHEDULE", "") or "auto"
        return f"auto, DPCORE_SCHEDULE {'unset or auto' if said == 'auto' else f'= {said}'}"
    return schedule if isinstance(schedule, str) else "the program's own"


def _check_methods(kind: type) -> None:
    for base in kind.__mro__:
        if base is LaunchSchedule or not issubclass(base, LaunchSchedule):
            continue
        for name, value in vars(base).items():
            is_method = isinstance(value, FunctionType | staticmethod | classmethod)
            if is_method and not name.startswith("_") and not hasattr(LaunchSchedule, name):
                raise Unsupported(_not_an_event(kind.__name__, name))


def _not_an_event(kind: str, name: str) -> str:
    meant = difflib.get_close_matches(name, EVENTS, 1)
    return (
        f"schedule {kind}: {name} is not an event, so it would never be called"
        + (f"; is it {meant[0]}? " if meant else ". ")
        + f"The events are {', '.join(EVENTS)}; helper methods begin with an underscore"
    )
