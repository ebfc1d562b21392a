"""The launch schedules that have a name: when buckets are sent, and how large they are.

    bucketed       each bucket as soon as its last gradient is there
    sequential     all buckets, after backward
    per_parameter  as bucketed, with a bucket for each parameter
    flat           as bucketed, with one bucket for everything
    oracle         never: what remains is the time that no schedule can save

And those that go on under the next forward, which across_steps.py has in full:

    priority       as bucketed, and what forward needs first goes first
    dear           the first half of each all-reduce under backward, the second under forward
    zero1          the same, but each rank steps its part, and parameters are gathered
    zero2          the same, and of gradients each rank keeps its part only

csrc/reducer/launch/launch_schedule.cpp has the schedules themselves, under the same names.
"""

from __future__ import annotations

from collections.abc import Sequence

SCHEDULES = ("bucketed", "sequential", "per_parameter", "flat", "oracle")
ACROSS_STEPS = ("priority", "dear", "zero1", "zero2")
EXACT = SCHEDULES[:4]  # gradients are averaged
CAPPED = SCHEDULES[:2]  # buckets have the size that was asked for
UNLIMITED = 1 << 62


def caps_of(schedule: str, wanted: Sequence[int]) -> Sequence[int]:
    """Bytes of the first, second, ... bucket; the last is for all further.

    >>> caps_of("bucketed", [1 << 20, 25 << 20]), caps_of("per_parameter", [1 << 20, 25 << 20])
    ([1048576, 26214400], [0])
    """
    return {"per_parameter": [0], "flat": [UNLIMITED]}.get(schedule, wanted)
