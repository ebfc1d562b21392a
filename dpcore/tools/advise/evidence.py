"""What a run shows about its steps, as the findings need it: milliseconds, by rank and step.

It is the same for a run of dpcore and for one of torch DDP. The first step is left out where there
are more, and so are steps whose buckets lie otherwise than in most, such as DDP's first.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from dpcore.recorder.file import DEVICE_TRACK, LOCAL_STEP, Event
from dpcore.recorder.intervals import Intervals, union_of, union_of_spans
from dpcore.recorder.profiled import Multiplied, ProfileFacts
from dpcore.tools.show.buckets import BucketSpan, bucket_spans
from dpcore.tools.show.figures import steps_of
from dpcore.tools.show.run import RankEvents, Run

TO_ENTER = "every rank to enter"
_NOT_ON_THE_LINK = (TO_ENTER, "a thread of ")
Shapes = tuple[tuple[int, ...], ...]
T = TypeVar("T")


@dataclass(frozen=True)
class Bucket:
    """Times count from the begin of backward. ``wire_ms``: from when the last rank has entered."""

    bytes: int
    first_ms: float
    full_ms: float
    launch_ms: float
    end_ms: float
    wire_ms: float


@dataclass(frozen=True)
class Step:
    """A step of a rank. ``exposed_ms``: it waits for communication, of which ``late_ms`` for a rank
    that has not entered. ``arrivals``: when each gradient came after the begin of backward, and its
    bytes. ``between_ms``: no operator of torch runs, outside of forward and backward."""

    ms: float
    forward_ms: float
    backward_ms: float
    exposed_ms: float
    late_ms: float = 0.0
    flight_ms: float = 0.0
    loading_ms: float = 0.0
    between_ms: float = 0.0
    copies_ms: float = 0.0
    optimizer_ms: float = 0.0
    search_ms: float | None = None
    idle: tuple[tuple[float, str], ...] = ()
    buckets: tuple[Bucket, ...] = ()
    arrivals: tuple[tuple[float, int], ...] = ()
    batch: Shapes = ()

    @property
    def computing_ms(self) -> float:
        """All that is neither waiting for others nor for data."""
        return max(0.0, self.ms - self.exposed_ms - self.loading_ms - self.between_ms)


@dataclass(frozen=True)
class Evidence:
    """``threads``, ``processors``, ``local_ranks``: of a host, 0 if unknown. ``gradients``: how
    many parameters have one, 0 if unknown. ``graphs``: what dpcore says of a compiled model.
    ``updates``: of local updates; each of ``ranks`` then has intervals, as the mean of their steps.
    """

    stack: str  # "torch DDP" or "dpcore"
    library: str
    on_gpu: bool
    world: int
    ranks: tuple[tuple[Step, ...], ...]
    numbers: tuple[int, ...]  # of these ranks
    hosts: int = 1
    link: str = ""  # an emulated one
    schedule: str = ""
    caps: tuple[int, ...] = ()
    threads: int = 0
    processors: int = 0
    local_ranks: int = 0
    governor: str = ""  # of the processors' clock
    pace: float = 1.0  # of the processors' clock, at most 1
    products: tuple[Multiplied, ...] = ()
    compiled: bool = False
    graphs: str = ""
    workers: bool = False
    unknown: tuple[str, ...] = ()
    updates: Mapping[str, int] | None = None

    @property
    def counted(self) -> str:
        """How many steps, or intervals, in words."""
        if self.updates is None:
            return f"{self.count} steps"
        return f"{self.count} intervals of {self.updates['sync_every']} steps"

    @property
    def of_torch(self) -> bool:
        return self.stack == "torch DDP"

    @property
    def count(self) -> int:
        """Steps that all ranks have."""
        return min((len(steps) for steps in self.ranks), default=0)

    @property
    def step_ms(self) -> float:
        return self.median(lambda step: step.ms)

    def median(self, of: Callable[[Step], float]) -> float:
        return statistics.median([of(step) for steps in self.ranks for step in steps] or [0.0])

    def together(self, of: Callable[[Step], float]) -> list[list[float]]:
        """For each step, the figure of every rank."""
        return [[of(steps[n]) for steps in self.ranks] for n in range(self.count)]

    @property
    def all_ranks(self) -> bool:
        return len(self.ranks) == self.world


def evidence_of(run: Run) -> Evidence:
    """Of a file of ``dpcore.trace`` or of files of torch's profiler."""
    updates = _local_updates(run)
    by_rank = [
        _steps(run, rank) if updates is None else _intervals(rank, updates["sync_every"])
        for rank in run.ranks
    ]
    layouts = Counter(
        tuple(bucket.bytes for bucket in step.buckets) for steps in by_rank for step in steps
    )
    most = layouts.most_common(1)[0][1] if layouts else 0
    usual = [layout for layout, many in layouts.items() if many == most]
    kept = [
        [step for step in steps if tuple(b.bytes for b in step.buckets) == usual[-1]]
        for steps in by_rank
    ]
    is_long = min(map(len, kept), default=0) > 3
    kept = [steps[1:] if is_long else steps for steps in kept]
    facts = [rank.facts or ProfileFacts() for rank in run.ranks]
    models = [
        model
        for model in run.models
        if model.get("schedule") and (updates is not None or not model.get("local_updates"))
    ]
    of_torch = run.about.startswith("torch.profiler") or any(
        model["schedule"] == "torch DDP" for model in models
    )
    model: dict[str, Any] = dict(models[-1]) if models else {}
    hosts = {rank.host for rank in run.ranks if rank.host}
    return Evidence(
        stack="torch DDP" if of_torch else "dpcore",
        library=run.transport or run.backend,
        on_gpu=any(e.thread == DEVICE_TRACK for rank in run.ranks for e in rank.operations),
        world=run.world_size,
        ranks=tuple(map(tuple, kept)),
        numbers=tuple(rank.rank for rank in run.ranks),
        hosts=max(1, len(hosts)),
        link=run.link,
        schedule="" if of_torch else str(model.get("schedule", "")),
        caps=tuple(model.get("bucket_caps", ())),
        threads=int(run.machine.get("threads", 0)),
        processors=int(run.machine.get("processors", 0)),
        local_ranks=int(run.machine.get("local_ranks", 0)),
        governor=str(run.machine.get("governor", "")),
        pace=float(run.machine.get("pace", 1.0)),
        products=tuple(facts[0].products) if facts else (),
        compiled=any(fact.compiled for fact in facts) or bool(model.get("compiled")),
        graphs="; ".join(model.get("compiled", ())),
        workers=any(fact.workers for fact in facts),
        unknown=tuple(_unknown(run, kept, updates)),
        updates=updates,
    )


def _local_updates(run: Run) -> Mapping[str, int] | None:
    """Of the one block that was recorded, if it was, and no ``DataParallel``."""
    blocks = [model["local_updates"] for model in run.models if model.get("local_updates")]
    names = {event.name for rank in run.ranks for event in rank.compute}
    return blocks[0] if len(blocks) == 1 and LOCAL_STEP in names - {"backward"} else None


def _intervals(rank: RankEvents, every: int) -> list[Step]:
    """Those of local updates, each as the mean of its steps: only one of many sends."""
    exposed, flight, late, both = _communication(rank)
    steps = steps_of(rank)
    found = []
    for first in range(0, len(steps) - every + 1, every):
        begin, end = steps[first][0], steps[first + every - 1][1]
        overlap = exposed.between(begin, end) + late.between(begin, end) - both.between(begin, end)
        ms = 1e-6 / every
        waited = exposed.between(begin, end)
        found.append(
            Step(
                ms=(end - begin) * ms,
                forward_ms=0.0,
                backward_ms=(end - begin - waited) * ms,
                exposed_ms=waited * ms,
                late_ms=overlap * ms,
                flight_ms=flight.between(begin, end) * ms,
            )
        )
    return found


def _communication(rank: RankEvents) -> tuple[Intervals, Intervals, Intervals, Intervals]:
    """Exposed, in flight, waiting for a rank to enter, and either the first or the last."""
    exposed, flight = union_of(rank.exposed), union_of(rank.operations)
    late = union_of([event for event in rank.waits if event.name == TO_ENTER])
    both = union_of_spans(
        [*exposed.begins.tolist(), *late.begins.tolist()],
        [*exposed.ends.tolist(), *late.ends.tolist()],
    )
    return exposed, flight, late, both


def _unknown(
    run: Run, kept: Sequence[Sequence[Step]], updates: Mapping[str, int] | None
) -> list[str]:
    said = []
    if len(run.ranks) < run.world_size:
        said.append(
            f"late ranks, since only {len(run.ranks)} of {run.world_size} ranks were recorded"
        )
    if updates is not None:
        if not all(kept):
            said.append(f"intervals, since none is whole: record {updates['sync_every']} steps")
    elif not all(kept):
        said.append(
            "steps, since none has both forward and backward: record some of a DataParallel or of "
            "torch's DistributedDataParallel"
        )
    elif not any(bucket.bytes for step in kept[0] for bucket in step.buckets):
        said.append("the sizes of buckets, for want of record_shapes=True")
    return said


def _steps(run: Run, rank: RankEvents) -> list[Step]:
    facts = rank.facts
    exposed, flight, late, both = _communication(rank)
    named = {
        name: [event for event in rank.compute if event.name == name]
        for name in ("forward", "backward", "optimizer", "update")
    }
    inside = union_of([event for events in named.values() for event in events])
    loading = _union(facts.loading) if facts else _union([])
    idle = _union([(b, e) for b, e, _ in facts.idle]) if facts else _union([])
    started: dict[int, int] = {}
    for event in rank.waits:
        if event.name.startswith(_NOT_ON_THE_LINK):
            started[event.operation] = max(event.end_ns, started.get(event.operation, 0))
    spans = sorted(bucket_spans(run, rank), key=_launched)
    found = []
    for begin, end in steps_of(rank):
        ms = {
            name: sum(e.ms for e in _within(events, begin, end, _begun))
            for name, events in named.items()
        }
        backward = next(iter(_within(named["backward"], begin, end, _begun)), None)
        if backward is None:
            continue
        mine = _within(spans, begin, end, _launched)
        overlap = exposed.between(begin, end) + late.between(begin, end) - both.between(begin, end)
        step_ms, exposed_ms = (end - begin) * 1e-6, exposed.between(begin, end) * 1e-6
        if facts is not None:
            quiet = _union([*facts.quiet])
            all_of_it = [inside, exposed, loading, idle]
            between_ms = _alone(quiet, all_of_it, begin, end) * 1e-6
        else:
            between_ms = max(0.0, step_ms - exposed_ms - sum(ms.values()))
        found.append(
            Step(
                ms=step_ms,
                forward_ms=ms["forward"],
                backward_ms=ms["backward"],
                exposed_ms=exposed_ms,
                late_ms=overlap * 1e-6,
                flight_ms=flight.between(begin, end) * 1e-6,
                loading_ms=loading.between(begin, end) * 1e-6,
                between_ms=between_ms,
                optimizer_ms=ms["optimizer"],
                copies_ms=_ms(facts.copies, begin, end) if facts else 0.0,
                search_ms=_search(facts, rank, begin, end),
                idle=_idle(facts, begin, end),
                buckets=tuple(_bucket(span, backward.begin_ns, started) for span in mine),
                arrivals=tuple(
                    ((e.begin_ns - backward.begin_ns) * 1e-6, e.bytes)
                    for e in _within(rank.ready, backward.begin_ns, end, _begun)
                ),
                batch=_batch(facts, begin, end),
            )
        )
    return found


def _begun(event: Event) -> int:
    return event.begin_ns


def _launched(span: BucketSpan) -> int:
    return span.launch_ns


def _within(events: Sequence[T], begin: int, end: int, at: Callable[[T], int]) -> Sequence[T]:
    """Those from ``begin`` until before ``end``; they are in that order. A trace may be long, and
    each of its steps asks."""
    return events[bisect_left(events, begin, key=at) : bisect_left(events, end, key=at)]


def _bucket(span: BucketSpan, since: int, started: dict[int, int]) -> Bucket:
    begin = max(span.launch_ns, started.get(span.operation, 0)) if span.sent_by else span.launch_ns
    return Bucket(
        bytes=span.bytes,
        first_ms=(span.first_ready_ns - since) * 1e-6,
        full_ms=(span.last_ready_ns - since) * 1e-6,
        launch_ms=(span.launch_ns - since) * 1e-6,
        end_ms=(span.end_ns - since) * 1e-6,
        wire_ms=max(0, span.end_ns - begin) * 1e-6,
    )


def _union(spans: Sequence[tuple[int, int]]) -> Intervals:
    return union_of_spans([begin for begin, _ in spans], [end for _, end in spans])


def _alone(of: Intervals, others: Sequence[Intervals], begin: int, end: int) -> int:
    """Nanoseconds of a step that these spans cover and no others do."""
    outer = union_of_spans(
        [b for other in others for b in other.begins.tolist()],
        [e for other in others for e in other.ends.tolist()],
    )
    whole = union_of_spans(
        [*outer.begins.tolist(), *of.begins.tolist()], [*outer.ends.tolist(), *of.ends.tolist()]
    )
    return whole.between(begin, end) - outer.between(begin, end)


def _ms(spans: Sequence[tuple[int, int]], begin: int, end: int) -> float:
    return sum(e - b for b, e in spans if begin <= b < end) * 1e-6


def _search(facts: ProfileFacts | None, rank: RankEvents, begin: int, end: int) -> float | None:
    """What the search for unused parameters takes, with the extra all-reduce at its end; None if
    there is none."""
    if facts is None or not any(begin <= at < end for at, _ in facts.searches):
        return None
    return _ms(facts.searches, begin, end)


def _idle(facts: ProfileFacts | None, begin: int, end: int) -> tuple[tuple[float, str], ...]:
    found = facts.idle if facts is not None else []
    return tuple(((e - b) * 1e-6, what) for b, e, what in found if begin <= b and e <= end)


def _batch(facts: ProfileFacts | None, begin: int, end: int) -> Shapes:
    found = facts.batches if facts is not None else []
    return next((shapes for at, shapes in found if begin <= at < end), ())
