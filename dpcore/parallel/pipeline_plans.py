"""Pipeline plans: which rank computes which micro-batch at which stage, in which order, as data.

A model is cut into stages, one behind the other, and a batch into micro-batches. An *action* is one
pass: ``2F5`` is the forward of micro-batch 5 through stage 2, ``2B5`` its backward. A backward may
be in two parts, ``2I5`` for the gradient of the input, which the stage before waits for, and
``2W5`` for that of the weights, which nobody waits for. A plan is a list of actions for each rank.

``GPipe``            all forwards, then all backwards; every micro-batch is live at once
``1F1B``             a backward as soon as there can be one: at most as many live as stages follow
``Interleaved1F1B``  several stages on a rank, shorter waits at the begin and at the end, and as
                     many times the messages

Idle time (the *bubble*) is (R-1)/(M+R-1) of a step for the first two, with R ranks, M micro-batches
and stages alike; for v stages on each rank (R-1)/(vM+R-1). A plan is checked when it is made, and
``price`` finds times for any plan. Loses where M is small, or stages differ.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, product
from pathlib import Path
from typing import NamedTuple

from dpcore.errors import Unsupported

NAMES = ("GPipe", "1F1B", "Interleaved1F1B")
_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_CELL = re.compile(r"\d+[FBIW]\d+|\((\d+[FBIW]\d+;?)+\)OVERLAP_F_B")


class Action(NamedTuple):
    """One pass of one micro-batch through one stage. ``kind``: F, B, or its halves I and W."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class Price(NamedTuple):
    """How long a plan takes: (action, begin, end) for each rank, and the end of the last one."""

    seconds: float
    spans: list[list[tuple[Action, float, float]]]

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they have nothing to compute."""
        busy = sum(end - begin for spans in self.spans for _, begin, end in spans)
        return 1 - busy / (self.seconds * len(self.spans))


def pipeline_plan(
    name: str | Path,
    *,
    stages: int | None = None,
    microbatches: int | None = None,
    ranks: int | None = None,
) -> PipelinePlan:
    """A plan by its name, "GPipe", "1F1B" or "Interleaved1F1B", or of a CSV file in torch's format.

    ``ranks`` share the stages in turns: rank r has the stages r, r + ranks, ... By default each
    stage has its own rank, and two share one under "Interleaved1F1B".

    >>> print(pipeline_plan("1F1B", stages=2, microbatches=3))
    1F1B: 2 stages on 2 ranks, 3 micro-batches, bubble 25.0%, at most 2 live
    rank 0  F0 F1 .. .. B0 -- F2 B1 -- .. B2 --
    rank 1  .. F0 B0 -- F1 B1 -- F2 B2 -- .. ..
    """
    if str(name).endswith(".csv"):
        return PipelinePlan.from_csv(Path(name).read_text(), Path(name).stem)
    if name not in NAMES:
        raise Unsupported(f"pipeline_plan: {name!r} is none of {NAMES}, and no file *.csv")
    if stages is None or microbatches is None:
        raise Unsupported(f"pipeline_plan: {name} needs stages= and microbatches=")
    ranks = ranks or (stages // 2 if name == "Interleaved1F1B" else stages)
    if min(stages, microbatches, ranks) < 1 or stages % ranks:
        raise Unsupported(
            f"pipeline_plan: {stages} stages on {ranks} ranks with {microbatches} micro-batches; "
            "all are positive, and each rank has as many stages"
        )
    if name != "Interleaved1F1B" and stages != ranks:
        raise Unsupported(f"pipeline_plan: {name} has a stage on each rank; try Interleaved1F1B")
    size = microbatches // max(1, microbatches // ranks)  # micro-batches that go round together
    if stages != ranks and microbatches % size:
        raise Unsupported(
            f"pipeline_plan: {microbatches} micro-batches can't go round {ranks} ranks in equal "
            f"groups; take {microbatches // ranks * ranks} or {-(-microbatches // ranks) * ranks}"
        )
    rows = []
    for rank in range(ranks):
        warm_up = (ranks - 1 - rank) * (2 if stages > ranks else 1) + (stages // ranks - 1) * size
        count = microbatches if name == "GPipe" else warm_up
        rows.append(_row(rank, range(rank, stages, ranks), microbatches, size, count))
    return PipelinePlan(str(name), tuple(rows))


def _row(
    rank: int, mine: Sequence[int], microbatches: int, size: int, warm_up: int
) -> tuple[Action, ...]:
    """Some forwards, then one forward and one backward in turns, then the backwards that are left.
    Groups of ``size`` micro-batches pass all of the rank's stages, one group after the other."""
    groups = [range(i, min(i + size, microbatches)) for i in range(0, microbatches, size)]
    forward = [Action(stage, "F", m) for group in groups for stage in mine for m in group]
    backward = [Action(stage, "B", m) for group in groups for stage in mine[::-1] for m in group]
    row, warm_up = forward[:warm_up], min(warm_up, len(forward))
    for pair in zip(forward[warm_up:], backward, strict=False):
        row += pair
    return tuple(row + backward[len(forward) - warm_up :])


@dataclass(frozen=True)
class PipelinePlan:
    """``actions[rank]``: what each rank computes, in its order. Every plan is complete, and nobody
    waits for ever."""

    name: str
    actions: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        self._check_complete()
        self.price()

    @cached_property
    def rank_of(self) -> dict[int, int]:
        """The rank of each stage."""
        return {action.stage: rank for rank, row in enumerate(self.actions) for action in row}

    @property
    def stages(self) -> int:
        return len(self.rank_of)

    @cached_property
    def microbatches(self) -> int:
        return 1 + max(action.microbatch for row in self.actions for action in row)

    @cached_property
    def _all(self) -> frozenset[Action]:
        return frozenset(action for row in self.actions for action in row)

    def needs(self, action: Action) -> list[Action]:
        """What must have ended before ``action`` begins, besides what stands before it."""
        stage, kind, m = action
        if kind == "F":
            return [Action(stage - 1, "F", m)] if stage > 0 else []
        if kind == "W":
            return [Action(stage, "I", m)]
        after = Action(stage + 1, "B" if Action(stage + 1, "B", m) in self._all else "I", m)
        return [Action(stage, "F", m)] + ([after] if stage + 1 < self.stages else [])

    def price(
        self,
        forward: float | Sequence[float] = 1.0,
        backward: float | Sequence[float] = 2.0,
        weight: float = 0.5,
        link: float = 0.0,
    ) -> Price:
        """When everything happens. ``forward``, ``backward``: time of a pass, or one for each
        stage; ``weight``: the share of W in a backward of two parts; ``link``: from one rank to
        another. Messages travel while ranks compute."""
        of_stage = {
            "F": _for_each(forward, self.stages, "forward"),
            "B": _for_each(backward, self.stages, "backward"),
        }
        share = {"F": 1.0, "B": 1.0, "I": 1 - weight, "W": weight}
        ends: dict[Action, float] = {}
        spans: list[list[tuple[Action, float, float]]] = [[] for _ in self.actions]
        while len(ends) < len(self._all):
            before, stuck = len(ends), []
            for rank, row in enumerate(self.actions):
                for action in row[len(spans[rank]) :]:
                    needs = self.needs(action)
                    if missing := next((need for need in needs if need not in ends), None):
                        there = self.rank_of[missing.stage]
                        stuck.append(f"rank {rank} waits in {action} for {missing} of rank {there}")
                        break
                    away = (link * (self.rank_of[need.stage] != rank) for need in needs)
                    ready = (ends[need] + way for need, way in zip(needs, away, strict=True))
                    begin = max([spans[rank][-1][2] if spans[rank] else 0.0, *ready])
                    kind = "F" if action.kind == "F" else "B"
                    ends[action] = begin + of_stage[kind][action.stage] * share[action.kind]
                    spans[rank].append((action, begin, ends[action]))
            if len(ends) == before:
                raise Unsupported(f"{self.name} would never end: {'; '.join(stuck)}")
        return Price(max(ends.values()), spans)

    def live(self) -> list[int]:
        """The most micro-batches, counted at each of its stages, that a rank has activations of."""
        change = {"F": 1, "I": 0, "B": -1, "W": -1}
        return [max(accumulate((change[a.kind] for a in row), initial=0)) for row in self.actions]

    def draw(self) -> str:
        """Rank by rank: a column lasts as long as F, I or W, and B two of them; dots are idle."""
        plain = self.stages == len(self.actions)  # then a rank has one stage, and needs no name
        price, width = self.price(), max(len(str(action)) for action in self._all) - plain
        lines = []
        for rank, spans in enumerate(price.spans):
            cells = ["." * width] * round(price.seconds)
            for action, begin, end in spans:
                first, last = round(begin), round(end)
                cells[first:last] = ["-" * width] * (last - first)
                cells[first] = str(action)[plain and len(str(action.stage)) :].ljust(width)
            lines.append(f"rank {rank}  {' '.join(cells).rstrip()}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.stages} stages on {len(self.actions)} ranks, "
            f"{self.microbatches} micro-batches, bubble {self.price().bubble:.1%}, "
            f"at most {max(self.live())} live\n{self.draw()}"
        )

    # ---- torch's format --------------------------------------------------------------------------

    def to_csv(self) -> str:
        """For ``_load_csv`` of torch's schedules: a line for each rank, a cell for each action."""
        return "".join(",".join(map(str, row)) + "\n" for row in self.actions)

    @classmethod
    def from_csv(cls, text: str, name: str = "csv") -> PipelinePlan:
        """Of a file that torch's ``_dump_csv(..., format="compute_only")`` has written. Passes that
        torch overlaps stand one after the other."""
        rows = []
        for line in text.splitlines():
            for cell in filter(None, map(str.strip, line.split(","))):
                if not _CELL.fullmatch(cell):
                    raise Unsupported(
                        f"pipeline_plan: {cell!r} is no pass such as 0F3; messages are no part of "
                        'a plan, so write it with format="compute_only"'
                    )
            found = _ACTION.findall(line)
            rows.append(tuple(Action(int(stage), kind, int(m)) for stage, kind, m in found))
        return cls(name, tuple(rows))

    # ---- what can be wrong -----------------------------------------------------------------------

    def _check_complete(self) -> None:
        placed, kinds = self.rank_of, defaultdict(list)
        if sorted(placed) != list(range(len(placed))) or not placed:
            raise Unsupported(f"{self.name}: stages are numbered from 0, and not {sorted(placed)}")
        for rank, row in enumerate(self.actions):
            for stage, kind, m in row:
                kinds[stage, m].append(kind)
                if (other := placed[stage]) != rank:
                    raise Unsupported(f"{self.name}: stage {stage} is on ranks {rank} and {other}")
        for stage, m in product(range(self.stages), range(self.microbatches)):
            found = sorted(kinds[stage, m])
            if found not in (["B", "F"], ["F", "I", "W"]):
                raise Unsupported(
                    f"{self.name}: stage {stage} has {' '.join(found) or 'nothing'} of "
                    f"micro-batch {m}; it needs F and B, or F, I and W"
                )


def _for_each(value: float | Sequence[float], stages: int, name: str) -> Sequence[float]:
    times = value if isinstance(value, Sequence) else [value] * stages
    if len(times) != stages:
        raise Unsupported(f"price: {name} has {len(times)} times for {stages} stages")
    return times
