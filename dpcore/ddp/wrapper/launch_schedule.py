"""What ``DataParallel(schedule=...)`` takes: the name of a schedule, or a ``LaunchSchedule``."""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Iterable
from types import FunctionType
from typing import Any

from dpcore.errors import Unsupported
from dpcore.reference.launch_schedule import EVENTS, LaunchSchedule
from dpcore.reference.launches import ACROSS_STEPS, EXACT, SCHEDULES, caps_of

NAMES = ("auto", *SCHEDULES, *ACROSS_STEPS)
_SHARDED = ("zero", "zero3", "fsdp", "sharded", "fully_sharded")


def goes_across_steps(schedule: str | LaunchSchedule) -> bool:
    """Whether the schedule's phases end under the next forward."""
    if isinstance(schedule, str):
        return schedule in ACROSS_STEPS
    return "update" in schedule.phases()


def keeps_caps(schedule: str | LaunchSchedule) -> bool:
    """Whether buckets get the requested sizes."""
    wanted = [1 << 20, 25 << 20]
    caps: Any = caps_of(schedule, wanted) if isinstance(schedule, str) else schedule.caps(wanted)
    return isinstance(caps, Iterable) and list(caps) == wanted


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
        check_methods(type(schedule))
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


def check_methods(kind: type) -> None:
    """Raises if a public method is no event."""
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
