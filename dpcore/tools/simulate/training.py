"""A step of data parallel training, predicted: gradients, buckets, launches, the wait at the end.

Left out: that communication takes processors and memory bandwidth from the computation beside it,
and what an operation costs a processor (some 20 us). So it is a bound that a run should come near
where the link is what takes time, and says little about memory that ranks share.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dpcore.base.link import Speed
from dpcore.base.user_code import naming_the_line
from dpcore.errors import Unsupported
from dpcore.reference.buckets import plan_buckets
from dpcore.reference.launches import SCHEDULES, caps_of
from dpcore.tools.simulate.gradients import Gradients
from dpcore.tools.simulate.links import Links
from dpcore.tools.simulate.network import Network, NetworkOperation
from dpcore.tools.simulate.rehearsal import copies_for, rehearse

_MOST_BYTES = 1 << 40


@dataclass(frozen=True)
class Prediction:
    """Milliseconds of a step, which is forward, backward and communication, of the rank that takes
    longest. ``bound_ms``: no schedule is faster, since the first gradient has to be there before
    the NIC has anything to do. ``bucket_cap_mb``: what was asked for, or None for the caps that
    come with the gradients."""

    schedule: str
    algorithm: str
    bucket_cap_mb: float | None
    buckets: int
    step_ms: float
    exposed_ms: float
    bound_ms: float


def predict(
    work: Gradients,
    link: Speed | Links,
    schedule: str | Any = "bucketed",
    bucket_cap_mb: float | None = None,
    algorithm: str = "two_shot",
) -> Prediction:
    """The step of a schedule over a link: of one with a name, or of a ``dpcore.LaunchSchedule`` (a
    class, or an object that every simulated rank gets a copy of). That one runs 20 steps, of which
    the last counts.
    Without ``bucket_cap_mb``, with the caps of the run that the gradients are from.

    >>> ready = [0.01 * i for i in range(1, 9)]
    >>> work = Gradients([1_250_000] * 8, [0] * 8, [0.01], [0.08], [ready])
    >>> predict(work.on(2), Speed(1.25e8), "sequential").exposed_ms
    80.0
    """
    _check(work, bucket_cap_mb)
    if isinstance(schedule, str):
        name = schedule
        buckets = _buckets(work, _caps(work, schedule, bucket_cap_mb))
        ends = _ends(work, buckets, link, schedule, algorithm)
    else:
        of_ranks = copies_for(schedule, work.world)
        name = type(of_ranks[0]).__name__
        with naming_the_line(f"schedule {name!r}"):
            buckets = _buckets(work, of_ranks[0].caps(_caps(work, "bucketed", bucket_cap_mb)))
        ends = rehearse(work, buckets, of_ranks, link, algorithm)
    computed = [f + b for f, b in zip(work.forward, work.backward, strict=True)]
    exposed = [max(0.0, end - alone) for end, alone in zip(ends, computed, strict=True)]
    return Prediction(
        schedule=name,
        algorithm=algorithm,
        bucket_cap_mb=bucket_cap_mb,
        buckets=len(buckets),
        step_ms=round(max(ends) * 1e3, 3),
        exposed_ms=round(statistics.mean(exposed) * 1e3, 3),
        bound_ms=round(bound_seconds(work, link) * 1e3, 3),
    )


def _check(work: Gradients, cap_mb: float | None) -> None:
    """What would be left out in silence, or never end."""
    if cap_mb is not None and not 0 <= cap_mb < math.inf:
        raise Unsupported(f"bucket_cap_mb={cap_mb}: a size of buckets is a number from 0 on")
    if sum(work.sizes) > _MOST_BYTES:
        raise Unsupported(
            f"{sum(work.sizes) / 2**40:.3g} TiB of gradients: at most 1 TiB can be simulated, "
            "since each message of it is"
        )


def bound_seconds(work: Gradients, link: Speed | Links) -> float:
    """Computing alone, or the time to the first gradient and all bytes at full bandwidth."""
    computed = work.compute_seconds
    if work.world == 1:
        return computed
    first = max(f + min(r) for f, r in zip(work.forward, work.ready, strict=True))
    return max(computed, first + Links.of(link).least_seconds(sum(work.sizes), work.world))


def _ends(
    work: Gradients,
    buckets: Sequence[Sequence[int]],
    link: Speed | Links,
    schedule: str,
    algorithm: str,
) -> list[float]:
    """When each rank is through with backward and all buckets."""
    ends = [f + b for f, b in zip(work.forward, work.backward, strict=True)]
    operations = []
    for number, bucket in enumerate(buckets):
        ready = [
            work.forward[rank] + max(work.ready[rank][gradient] for gradient in bucket)
            for rank in range(work.world)
        ]
        nbytes = sum(work.sizes[gradient] for gradient in bucket)
        is_late = schedule == "sequential"
        operations.append(
            NetworkOperation(nbytes, ends if is_late else ready, 0 if is_late else number)
        )
    if schedule == "oracle":
        return ends
    Network(work.world, link, algorithm).run(operations)
    return [
        max([ends[rank], *(operation.finished[rank] for operation in operations)])
        for rank in range(work.world)
    ]


def _caps(work: Gradients, schedule: str, cap_mb: float | None) -> Sequence[int]:
    if schedule not in SCHEDULES:
        raise Unsupported(
            f"schedule {schedule!r}: choose from {', '.join(SCHEDULES)}, or give one of your own "
            "as mine.py:MySchedule"
        )
    wanted = list(work.caps) if cap_mb is None else [int(cap_mb * (1 << 20))]
    return caps_of(schedule, wanted)


def _buckets(work: Gradients, caps: Sequence[int]) -> list[list[int]]:
    """As the reducer plans them after the first step: in the order of arrival on rank 0."""
    order = sorted(range(len(work.sizes)), key=lambda gradient: work.ready[0][gradient])
    return plan_buckets(work.sizes, work.kinds, order, caps)
