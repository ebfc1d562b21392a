"""The numbers of a run. Page, picture, tables and ``--json`` all show these, from here.

*Communication* is the time with at least one operation in flight, *exposed* the time in which a
thread of the program sat in a communication call, *overlap* the share of the communication that
was not exposed. What communication costs computation by running beside it is in no trace of one
run: ``dpcore.measure_overlap`` measures that.
"""

from __future__ import annotations

import bisect
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dpcore.base.markup import short
from dpcore.recorder.file import LOCAL_STEP, Event
from dpcore.recorder.intervals import Intervals, union_of
from dpcore.tools.show.pipelines import PipelineFigures, pipeline_of
from dpcore.tools.show.rings import TurnFigures, turns_of
from dpcore.tools.show.run import RankEvents, Run
from dpcore.tools.show.spans import SpanFigures, spans_of

Step = tuple[int, int]  # begin and end in nanoseconds


@dataclass(frozen=True)
class RankFigures:
    """Of one rank. Exposed time and communication are of the whole trace; a step, a forward and a
    backward are medians, and None where no ``DataParallel`` was traced."""

    rank: int
    exposed_ms: float
    communication_ms: float
    overlap: float | None  # None: nothing was communicated
    step_ms: float | None
    forward_ms: float | None
    backward_ms: float | None
    dropped: int


@dataclass(frozen=True)
class OperationFigures:
    """All operations of a collective, added up over the whole trace and all ranks."""

    name: str
    count: int
    bytes: int
    in_flight_ms: float
    exposed_ms: float
    paths: dict[str, int]  # how many took which, as far as the file knows


@dataclass(frozen=True)
class WaitFigures:
    """All waits of one name on all ranks: what operations stood still for."""

    name: str
    count: int
    total_ms: float
    longest_ms: float


@dataclass(frozen=True)
class RunFigures:
    """Of a run, means over the ranks. ``exposed_ms`` and ``communication_ms`` are of the whole
    trace, as those of the ranks are; the same per step is None where there are no steps."""

    name: str
    world_size: int
    steps: int
    exposed_ms: float
    communication_ms: float
    exposed_ms_per_step: float | None
    communication_ms_per_step: float | None
    overlap: float | None
    step_ms: float | None
    ranks: list[RankFigures]
    operations: list[OperationFigures]
    waits: list[WaitFigures]
    pipeline: PipelineFigures | None = None
    spans: list[SpanFigures] = field(default_factory=list)
    ring: list[TurnFigures] = field(default_factory=list)

    @property
    def headline(self) -> str:
        """The run in a line."""
        if self.overlap is None:
            return "no communication was recorded"
        exposed, communication = self.shown_ms
        per_step = " per step" if self.steps else ""
        return (
            f"exposed {short(exposed)} of {short(communication)} ms of "
            f"communication{per_step}, overlap {self.overlap:.0%}"
        )

    @property
    def shown_ms(self) -> tuple[float, float]:
        """Exposed time and communication: per step where there are steps, else of the trace."""
        if self.exposed_ms_per_step is None or self.communication_ms_per_step is None:
            return self.exposed_ms, self.communication_ms
        return self.exposed_ms_per_step, self.communication_ms_per_step

    def as_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {"headline": self.headline, **asdict(self)}


def steps_of(rank: RankEvents) -> list[Step]:
    """Those that the file names; else from each forward to the next, and the last ends with
    whatever ends last. Where buckets are sent, a step goes on until one was: the forwards of
    accumulated gradients, or of several models, are in one. Under local updates, those of the
    optimizer."""
    if rank.steps:
        return rank.steps
    if not any(e.name == "backward" for e in rank.compute):
        return [(e.begin_ns, e.end_ns) for e in rank.compute if e.name == LOCAL_STEP]
    begins: list[int] = []
    launches = [event.begin_ns for event in rank.launches]
    for forward in (e.begin_ns for e in rank.compute if e.name == "forward"):
        since = bisect.bisect_left(launches, begins[-1]) if begins else 0
        is_sent = since < len(launches) and launches[since] < forward
        if is_sent or not begins or not launches:
            begins.append(forward)
    last = max(e.end_ns for e in (*rank.compute, *rank.exposed, *rank.operations))
    return list(zip(begins, [*begins[1:], last], strict=True))


def communication_of(rank: RankEvents) -> Intervals:
    return union_of(rank.operations)


def exposed_of(rank: RankEvents) -> Intervals:
    return union_of(rank.exposed)


def figures_of(run: Run) -> RunFigures:
    """Everything that is said about a run in numbers."""
    ranks = [_of_rank(rank) for rank in run.ranks]
    steps = max(len(steps_of(rank)) for rank in run.ranks)
    exposed = statistics.fmean(rank.exposed_ms for rank in ranks)
    communication = statistics.fmean(rank.communication_ms for rank in ranks)
    hidden = statistics.fmean((rank.overlap or 0.0) * rank.communication_ms for rank in ranks)
    step_ms = [rank.step_ms for rank in ranks if rank.step_ms is not None]
    return RunFigures(
        name=run.name,
        world_size=run.world_size,
        steps=steps,
        exposed_ms=exposed,
        communication_ms=communication,
        exposed_ms_per_step=exposed / steps if steps else None,
        communication_ms_per_step=communication / steps if steps else None,
        overlap=hidden / communication if communication > 0 else None,
        step_ms=statistics.mean(step_ms) if step_ms else None,
        ranks=ranks,
        operations=_operations(run),
        waits=_waits(run.ranks),
        pipeline=pipeline_of(run),
        spans=spans_of(run),
        ring=turns_of(run),
    )


def _of_rank(rank: RankEvents) -> RankFigures:
    communication, exposed = communication_of(rank), exposed_of(rank)
    total = communication.total_ns
    steps = steps_of(rank)
    return RankFigures(
        rank=rank.rank,
        exposed_ms=exposed.total_ns * 1e-6,
        communication_ms=total * 1e-6,
        overlap=1 - communication.within(exposed) / total if total else None,
        step_ms=statistics.median((end - begin) * 1e-6 for begin, end in steps) if steps else None,
        forward_ms=_median_ms(rank.compute, "forward"),
        backward_ms=_median_ms(rank.compute, "backward"),
        dropped=rank.dropped,
    )


def _median_ms(events: Sequence[Event], name: str) -> float | None:
    times = [event.ms for event in events if event.name == name]
    return statistics.median(times) if times else None


def _operations(run: Run) -> list[OperationFigures]:
    names = {e.name for rank in run.ranks for e in (*rank.operations, *rank.exposed)}
    result = []
    for name in names:
        mine = [e for rank in run.ranks for e in rank.operations if e.name == name]
        exposed = [e for rank in run.ranks for e in rank.exposed if e.name == name]
        result.append(
            OperationFigures(
                name=name,
                count=len(mine),
                bytes=sum(e.bytes for e in mine),
                in_flight_ms=sum(e.ms for e in mine),
                exposed_ms=sum(e.ms for e in exposed),
                paths=_paths(run, name, mine),
            )
        )
    return sorted(result, key=lambda line: -line.in_flight_ms)


def _paths(run: Run, name: str, operations: Sequence[Event]) -> dict[str, int]:
    told = Counter(event.path for event in operations if event.path)
    return dict(told.most_common()) if told else dict(run.paths.get(name, {}))


def _waits(ranks: Sequence[RankEvents]) -> list[WaitFigures]:
    times: dict[str, list[float]] = {}
    for rank in ranks:
        for event in rank.waits:
            times.setdefault(event.name, []).append(event.ms)
    lines = [WaitFigures(name, len(ms), sum(ms), max(ms)) for name, ms in times.items()]
    return sorted(lines, key=lambda line: -line.total_ms)
