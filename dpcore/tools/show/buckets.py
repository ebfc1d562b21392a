"""When a bucket filled, waited and travelled: from the events "ready", "launch" and "operation".

The events name models, gradients and buckets by numbers; the model's description in the file says
which gradients are in a bucket. In files that name no model, numbers mean something only if one
model is described. Buckets are planned anew once, after the first iteration: a launch of another
size than the described bucket belongs to the older plan, and only its times are known.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from dpcore.recorder.file import Event
from dpcore.recorder.intervals import Intervals, union_of
from dpcore.reference.buckets import ALIGNMENT
from dpcore.tools.show.figures import steps_of
from dpcore.tools.show.run import RankEvents, Run

SLICE = "bucket slice"  # the name of a launch of a part of a bucket
_SHOWN_NAMES = 3
PHASES = ("all_reduce", "reduce_scatter", "all_gather")
_MOST_RANKS = 64  # a scattered bucket is a multiple of them long
_SOME_GRADIENTS = 64
_LOOKED_AT = 256  # operations that may begin between the launch of a bucket and its own


@dataclass(frozen=True)
class BucketSpan:
    """One bucket in one step, in nanoseconds: its first gradient came, its last one, it was sent,
    it was complete. ``sent_by``: the operation, where the communicator recorded it.
    ``exposed_ns``: how long the program sat waiting while this was the first of the buckets that
    were on their way."""

    bucket: int
    bytes: int
    first_ready_ns: int
    last_ready_ns: int
    launch_ns: int
    end_ns: int
    sent_by: Event | None
    model: int = 0
    exposed_ns: int = 0

    @property
    def operation(self) -> int:
        """The number of the operation, -1 where there is none."""
        return -1 if self.sent_by is None else self.sent_by.operation

    @property
    def phase(self) -> str:
        """The phase of its bucket, where that has several."""
        name = "" if self.sent_by is None else self.sent_by.name
        return name if name in PHASES[1:] else ""


def bucket_spans(run: Run, rank: RankEvents) -> list[BucketSpan]:
    """All buckets that a rank sent, by the time of their first gradient."""
    arrivals: dict[tuple[int, int], list[int]] = {}
    for event in rank.ready:
        arrivals.setdefault((event.model, event.operation), []).append(event.begin_ns)
    gradients = max((len(model["parameters"]) for model in run.models), default=_SOME_GRADIENTS)
    operations = _Operations(rank.operations, gradients)
    numbers = {launch.model for launch in rank.launches}
    described = {number: described_model(run, number) for number in numbers}
    sent_before: dict[tuple[int, int], int] = {}
    ready_before: dict[tuple[int, int], list[int]] = {}
    launched = list(_launched_with(rank.launches, operations))
    begins = [launch.begin_ns for launch, _ in launched]
    ends = [launch.begin_ns if sent is None else sent.end_ns for launch, sent in launched]
    exposed = _exposed_ns(begins, ends, union_of(rank.exposed))
    spans = []
    for (launch, operation), end_ns, exposed_ns in zip(launched, ends, exposed, strict=True):
        bucket = launch.model, launch.operation
        since = sent_before.get(bucket, 0)
        ready = [t for t in _ready_times(launch, described[launch.model], arrivals) if t >= since]
        if launch.name == SLICE and not ready:
            ready = ready_before.get(bucket, [])  # those of the slices before it
        sent_before[bucket], ready_before[bucket] = launch.begin_ns, ready
        spans.append(
            BucketSpan(
                bucket=launch.operation,
                bytes=launch.bytes,
                first_ready_ns=min(ready, default=launch.begin_ns),
                last_ready_ns=max(ready, default=launch.begin_ns),
                launch_ns=launch.begin_ns,
                end_ns=end_ns,
                sent_by=operation,
                model=launch.model,
                exposed_ns=exposed_ns,
            )
        )
    return sorted(spans, key=lambda span: span.first_ready_ns)


def averaging_spans(run: Run, rank: RankEvents) -> list[BucketSpan]:
    """What a rank sent in a block of local updates, which has no buckets: an operation for each
    fragment of the model, numbered within its step."""
    if not any(model.get("local_updates") for model in run.models):
        return []
    sent = [event for event in rank.operations if event.name in PHASES]
    begins = [begin for begin, _ in steps_of(rank)]
    exposed = _exposed_ns(
        [event.begin_ns for event in sent], [e.end_ns for e in sent], union_of(rank.exposed)
    )
    in_step: Counter[int] = Counter()
    spans = []
    for event, exposed_ns in zip(sent, exposed, strict=True):
        at = bisect.bisect_right(begins, event.begin_ns)
        spans.append(
            BucketSpan(
                bucket=in_step[at],
                bytes=event.bytes,
                first_ready_ns=event.begin_ns,
                last_ready_ns=event.begin_ns,
                launch_ns=event.begin_ns,
                end_ns=event.end_ns,
                sent_by=event,
                exposed_ns=exposed_ns,
            )
        )
        in_step[at] += 1
    return spans


def _launched_with(
    launches: Sequence[Event], operations: _Operations
) -> Iterator[tuple[Event, Event | None]]:
    """Each with its operation. Buckets of one moment went as one."""
    for (begin, _), together in groupby(launches, lambda launch: (launch.begin_ns, launch.model)):
        members = list(together)
        operation = operations.take(begin, sum(launch.bytes for launch in members))
        for launch in members:
            yield launch, operation


def _exposed_ns(begins: Sequence[int], ends: Sequence[int], exposed: Intervals) -> list[int]:
    """Of each bucket, in the order in which they were sent. Exposed time belongs to the bucket that
    was sent first among those that are on their way: DDP waits for them in this order. So the parts
    of the buckets add up to the whole."""
    until = np.maximum.accumulate([0, *ends])
    since = np.maximum(begins, until[:-1])
    times = exposed.covered_until(np.maximum(until[1:], since)) - exposed.covered_until(since)
    return [int(ns) for ns in times.tolist()]


def parameters_of(run: Run, bucket: int, nbytes: int, model: int = 0) -> str:
    """The parameters of a bucket for human eyes, or nothing where they are not known."""
    described = described_model(run, model)
    if described is None or not _fits(described, bucket, nbytes):
        return ""
    names = [described["parameters"][n] for n in described["buckets"][bucket]["gradients"]]
    more = len(names) - _SHOWN_NAMES
    return ", ".join(names[:_SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")


def gradient_name(run: Run, number: int, model: int = 0) -> str:
    """The parameter whose gradient has this number, or nothing."""
    described = described_model(run, model)
    names: Sequence[str] = described["parameters"] if described is not None else ()
    return names[number] if number < len(names) else ""


def pack_lanes(spans: Sequence[BucketSpan]) -> list[int]:
    """A lane for each span, so that those of one lane follow each other."""
    free_from: list[int] = []
    lanes = []
    for span in spans:
        end = max(span.end_ns, span.first_ready_ns + 1)
        lane = next((i for i, t in enumerate(free_from) if t <= span.first_ready_ns), None)
        if lane is None:
            lane = len(free_from)
            free_from.append(end)
        free_from[lane] = end
        lanes.append(lane)
    return lanes


def described_model(run: Run, number: int) -> Mapping[str, Any] | None:
    """The model with this number. 0, in files that name none: the only one, if there is one."""
    if number == 0:
        return run.models[0] if len(run.models) == 1 else None
    return next((model for model in run.models if model.get("number") == number), None)


def model_name(run: Run, number: int) -> str:
    """What the model is called where the run has several, else nothing."""
    described = described_model(run, number) if len(run.models) > 1 else None
    return "" if described is None else str(described.get("name", ""))


def _fits(described: Mapping[str, Any], bucket: int, nbytes: int) -> bool:
    buckets = described["buckets"]
    return bucket < len(buckets) and buckets[bucket]["bytes"] == nbytes


def _ready_times(
    launch: Event,
    described: Mapping[str, Any] | None,
    arrivals: Mapping[tuple[int, int], Sequence[int]],
) -> list[int]:
    if described is None:
        return []
    nbytes = launch.bytes
    if launch.name == SLICE and launch.operation < len(described["buckets"]):
        nbytes = described["buckets"][launch.operation]["bytes"]  # of all its slices
    if not _fits(described, launch.operation, nbytes):
        return []
    times = []
    for number in described["buckets"][launch.operation]["gradients"]:
        known = arrivals.get((launch.model, number), ())
        at = bisect.bisect_right(known, launch.begin_ns) - 1
        if at >= 0:
            times.append(known[at])
    return times


class _Operations:
    """The operations of a rank that buckets travel by, each to be taken once. A bucket is sent by
    the same call that notes its launch, so its operation is the next one to begin; its size says
    whether it is that and not one of the program's own. In a bucket gradients are aligned, which
    makes it larger; one that travels in a narrower type has a half or a quarter of the bytes."""

    def __init__(self, operations: Sequence[Event], gradients: int) -> None:
        self._left = [event for event in operations if event.name in PHASES]
        self._begins = [event.begin_ns for event in self._left]
        self._taken: set[int] = set()
        self._padding = ALIGNMENT * gradients + _MOST_RANKS * ALIGNMENT

    def take(self, launched_ns: int, nbytes: int) -> Event | None:
        at = bisect.bisect_left(self._begins, launched_ns)
        for narrower in (1, 2, 4):
            for index in range(at, min(at + _LOOKED_AT, len(self._left))):
                more = self._left[index].bytes * narrower - nbytes
                if index not in self._taken and 0 <= more <= self._padding:
                    self._taken.add(index)
                    return self._left[index]
        return None
