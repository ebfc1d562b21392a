"""Pipelines in a trace: how much of the time is bubble, and which pass a message goes to.

A span that is called 2F3 is the forward of micro-batch 3 through stage 2; B is its backward, I and
W are the two halves of one. ``dpcore.reference.pipeline`` records such spans, and any program can.

The *measured* bubble is the share of a step, from its first pass to its last, in which a rank runs
none of them. The *priced* one is that of the plan which the ranks followed, with the medians of the
measured passes and links that cost nothing: what is above it went to messages and to waiting.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dpcore.errors import Unsupported
from dpcore.parallel.pipeline_costs import Action, live
from dpcore.parallel.pipeline_plans import PipelinePlan
from dpcore.recorder.file import Event
from dpcore.tools.show.run import RankEvents, Run

Step = list[tuple[Action, Event]]  # of one rank


@dataclass(frozen=True)
class PassFigures:
    """One rank's stages, the medians of its passes, the share of a step without a pass, and the
    most micro-batches that it kept activations of."""

    rank: int
    stages: list[int]
    forward_ms: float
    backward_ms: float
    bubble: float
    live: int


@dataclass(frozen=True)
class PipelineFigures:
    """The figures of all ranks: shares of the time, and medians over the steps. ``priced``: None
    where a step is not complete."""

    steps: int
    bubble: float
    priced: float | None
    ranks: list[PassFigures]

    @property
    def headline(self) -> str:
        """In a few words."""
        priced = "" if self.priced is None else f" ({self.priced:.1%} priced)"
        return f"bubble {self.bubble:.1%}{priced}"


class Message(NamedTuple):
    """From the call of its sender to the end of its receive."""

    source: int
    target: int
    tag: int
    bytes: int
    begin_ns: int
    end_ns: int


def pipeline_of(run: Run) -> PipelineFigures | None:
    """None where no rank has recorded passes."""
    of_ranks = {rank.rank: steps for rank in run.ranks if (steps := _steps_of(rank))}
    if not of_ranks:
        return None
    shares = [_shares([steps[k] for steps in of_ranks.values()])
              for k in range(min(map(len, of_ranks.values())))]  # fmt: skip
    lines = []
    for (rank, steps), of_rank in zip(of_ranks.items(), zip(*shares, strict=True), strict=True):
        lines.append(
            PassFigures(
                rank=rank,
                stages=sorted({action.stage for action, _ in steps[0]}),
                forward_ms=_median_ms(steps, "F"),
                backward_ms=_median_ms(steps, "B") or sum(_median_ms(steps, k) for k in "IW"),
                bubble=statistics.median(of_rank),
                live=live(action for action, _ in steps[0]),
            )
        )
    bubble = statistics.median(statistics.fmean(of_step) for of_step in shares)
    return PipelineFigures(len(shares), bubble, _priced(run.name, of_ranks, lines), lines)


def messages_of(run: Run) -> list[Message]:
    """Sends with their receives. Those of two ranks with one tag come in the order of the calls.
    Earlier files don't say to whom a message goes, and have none."""
    received: dict[tuple[int, int, int], list[Event]] = {}
    for rank in run.ranks:
        for event in rank.operations:
            if event.name == "recv" and event.peer >= 0:
                received.setdefault((event.peer, rank.rank, event.operation), []).append(event)
    places = {way: iter(events) for way, events in received.items()}
    found = []
    for rank in run.ranks:
        for event in rank.operations:
            way = rank.rank, event.peer, event.operation
            if event.name == "send" and (came := next(places.get(way, iter(())), None)):
                found.append(Message(*way, event.bytes, event.begin_ns, came.end_ns))
    return sorted(found, key=lambda message: message.begin_ns)


def _steps_of(rank: RankEvents) -> list[Step]:
    """A step ends where a pass comes again."""
    steps: list[Step] = []
    seen: set[Action] = set()
    for event in rank.compute:
        if (action := Action.of(event.name)) is not None:
            if not steps or action in seen:
                steps.append([])
                seen = set()
            seen.add(action)
            steps[-1].append((action, event))
    return steps


def _shares(of_ranks: Sequence[Step]) -> list[float]:
    """The bubble of each rank in one step."""
    events = [[event for _, event in step] for step in of_ranks]
    begin = min(event.begin_ns for of_rank in events for event in of_rank)
    end = max(event.end_ns for of_rank in events for event in of_rank)
    return [1 - sum(e.end_ns - e.begin_ns for e in mine) / max(1, end - begin) for mine in events]


def _median_ms(steps: Sequence[Step], kind: str, stage: int | None = None) -> float:
    times = [event.ms for event in _events(steps, kind, stage)]
    return statistics.median(times) if times else 0.0


def _events(steps: Sequence[Step], kind: str, stage: int | None) -> Iterator[Event]:
    for step in steps:
        for action, event in step:
            if action.kind == kind and stage in (None, action.stage):
                yield event


def _priced(
    name: str, of_ranks: dict[int, list[Step]], lines: Sequence[PassFigures]
) -> float | None:
    """Ranks with the same stages are copies of one: the plan has a row for the first of them."""
    rows = {tuple(line.stages): of_ranks[line.rank][0] for line in reversed(lines)}
    try:
        plan = PipelinePlan(
            name, tuple(tuple(action for action, _ in row) for row in rows.values())
        )
    except Unsupported:  # events were dropped, or the program recorded a part of it
        return None
    every = [step for steps in of_ranks.values() for step in steps]
    times = {
        kind: [_median_ms(every, kind, stage) for stage in range(plan.stages)] for kind in "FBIW"
    }
    halves = [i + w for i, w in zip(times["I"], times["W"], strict=True)]
    backward = [b or half for b, half in zip(times["B"], halves, strict=True)]
    weight = sum(times["W"]) / sum(halves) if sum(halves) else 0.5
    return plan.price(times["F"], backward, weight).bubble
