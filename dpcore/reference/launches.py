"""The named launch schedules: when buckets are sent, and how large they are.

    bucketed       each bucket as soon as its last gradient is ready
    sequential     all buckets, after backward
    per_parameter  as bucketed, with a bucket for each parameter
    flat           as bucketed, with one bucket for everything
    oracle         never: what remains is the time that no schedule can save

These continue under the next forward, and across_steps.py has them in full:

    priority       as bucketed, but buckets that forward needs first overtake others
    dear           the first half of each all-reduce under backward, the second under forward
    zero1          the same, but each rank steps its part, and parameters are gathered
    zero2          the same, and each rank keeps only its part of the gradients

csrc/reducer/launch/launch_schedule.cpp has the schedules themselves, under the same names.
"""

from __future__ import annotations

from collections.abc import Sequence

SCHEDULES = ("bucketed", "sequential", "per_parameter", "flat", "oracle")
ACROSS_STEPS = ("priority", "dear", "zero1", "zero2")
EXACT = SCHEDULES[:4]  # gradients are averaged
CAPPED = SCHEDULES[:2]  # buckets have the requested size
UNLIMITED = 1 << 62


def caps_of(schedule: str, wanted: Sequence[int]) -> Sequence[int]:
    """Bytes of the first, second, ... bucket; the last is for all further.

    >>> caps_of("bucketed", [1 << 20, 25 << 20]), caps_of("per_parameter", [1 << 20, 25 << 20])
    ([1048576, 26214400], [0])
    """
    return {"per_parameter": [0], "flat": [UNLIMITED]}.get(schedule, wanted)
