"""The time of a pipeline plan: when each pass begins and ends, and the share of idle time."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from numbers import Real
from typing import Any, NamedTuple

from dpcore.errors import Unsupported

_PASS = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})")


class Action(NamedTuple):
    """One pass of one micro-batch through one stage. ``kind``: F for forward, B for backward, or
    its halves: I for the gradient of the input, W for that of the weights."""

    stage: int
    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def of(cls, text: str) -> Action | None:
        """The pass with this name.

        >>> Action.of("2F3"), Action.of("forward")
        (Action(stage=2, kind='F', microbatch=3), None)
        """
        found = _PASS.fullmatch(text)
        return cls(int(found[1]), found[2], int(found[3])) if found else None


class Price(NamedTuple):
    """The times of a plan: (action, begin, end) for each rank, and the end of the last one."""

    seconds: float
    spans: list[list[tuple[Action, float, float]]]

    @property
    def bubble(self) -> float:
        """The share of the ranks' time in which they are idle."""
        busy = sum(end - begin for spans in self.spans for _, begin, end in spans)
        return 1 - busy / (self.seconds * len(self.spans)) if self.seconds else 0.0

    def draw(self) -> str:
        """A line per rank. A column is as long as the shortest pass; dots are idle time, dashes
        continue a pass."""
        times = [end - begin for spans in self.spans for _, begin, end in spans if end > begin]
        if not times:
            return "no pass takes any time"
        shortest = min(times)

        def column(time: float) -> int:
            return math.floor(time / shortest + 0.5 + 1e-9)

        stages = [{action.stage for action, _, _ in spans} for spans in self.spans]
        plain = all(len(of_rank) == 1 for of_rank in stages)  # then a stage needs no name
        names = {a: f"{'' if plain else a.stage}{a.kind}{a.microbatch}"
                 for spans in self.spans for a, _, _ in spans}  # fmt: skip
        width = max(map(len, names.values()))
        lines = []
        for rank, spans in enumerate(self.spans):
            cells = ["." * width] * column(self.seconds)
            for action, begin, end in spans:
                if (first := column(begin)) < (last := column(end)):
                    cells[first:last] = ["-" * width] * (last - first)
                    cells[first] = names[action].ljust(width)
            lines.append(f"rank {rank}  {' '.join(cells).rstrip()}")
        return "\n".join(lines)


def price(
    name: str,
    rows: Sequence[Sequence[Action]],
    needs: Callable[[Action], list[Action]],
    forward: float | Sequence[float],
    backward: float | Sequence[float],
    weight: float,
    link: float,
) -> Price:
    """Prices a plan in which each rank computes its row in order. A pass begins when its rank is
    free and the passes that it needs have ended; a result of another rank takes ``link`` more.
    Raises if ranks would deadlock."""
    rank_of = {action.stage: rank for rank, row in enumerate(rows) for action in row}
    of_stage = {
        "F": _for_each(forward, len(rank_of), "forward"),
        "B": _for_each(backward, len(rank_of), "backward"),
    }
    if _time(weight, "weight") > 1:
        raise Unsupported(f"price: weight={weight} is a share of a backward, at most 1")
    link = _time(link, "link")
    share = {"F": 1.0, "B": 1.0, "I": 1 - weight, "W": weight}
    ends: dict[Action, float] = {}
    spans: list[list[tuple[Action, float, float]]] = [[] for _ in rows]
    while len(ends) < sum(map(len, rows)):
        before, stuck = len(ends), []
        for rank, row in enumerate(rows):
            for action in row[len(spans[rank]) :]:
                if missing := next((need for need in needs(action) if need not in ends), None):
                    there = rank_of[missing.stage]
                    stuck.append(f"rank {rank} waits in {action} for {missing} of rank {there}")
                    break
                begin = max(
                    [spans[rank][-1][2] if spans[rank] else 0.0]
                    + [ends[n] + link * (rank_of[n.stage] != rank) for n in needs(action)]
                )
                whole = of_stage["F" if action.kind == "F" else "B"][action.stage]
                ends[action] = begin + whole * share[action.kind]
                spans[rank].append((action, begin, ends[action]))
        if len(ends) == before:
            raise Unsupported(f"{name} would never end: {'; '.join(stuck)}")
    return Price(max(ends.values()), spans)


def live(row: Iterable[Action]) -> int:
    """The most micro-batches whose activations a rank holds at once, counted per stage."""
    change = {"F": 1, "I": 0, "B": -1, "W": -1}
    return max(accumulate((change[action.kind] for action in row), initial=0))


def _for_each(value: Any, stages: int, name: str) -> Sequence[float]:
    is_one = isinstance(value, str) or not isinstance(value, Sequence)
    times: Sequence[Any] = [value] * stages if is_one else value
    if len(times) != stages:
        raise Unsupported(f"price: {name} has {len(times)} times for {stages} stages")
    return [_time(time, name) for time in times]


def _time(value: Any, name: str) -> float:
    if not isinstance(value, Real) or not 0 <= float(value) < math.inf:
        raise Unsupported(f"price: {name}={value!r}: it must be a number, 0 or more")
    return float(value)
