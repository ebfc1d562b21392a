"""How much of a program's own spans went to communication: of a layer, of a pass of a pipeline.

``trace.layers(model.blocks)`` records "layer 3", its forward, and "layer 3 back"; ``trace.span``
records any other. Under tensor parallelism a layer waits for its all-reduces, since the next one
needs them: that time is exposed, and this says in which layer.
"""

from __future__ import annotations

import functools
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dpcore.parallel.pipeline_costs import Action
from dpcore.recorder.file import Event
from dpcore.recorder.intervals import Intervals, union_of
from dpcore.tools.show.rings import block_of
from dpcore.tools.show.run import RankEvents, Run

# Those of a whole model: other figures are about these.
_OF_MODELS = {"forward", "backward", "update", "optimizer"}
_PASSES = {"F": "forward", "B": "backward", "I": "of inputs", "W": "of weights"}
_LEGEND = {
    "forward": "forward",
    "backward": "backward",
    "input": "of inputs (I)",
    "weight": "of weights (W)",
    "update": "update",
    "span": "step or span",
    "filling": "bucket filling",
    "full": "full, not sent",
    "flight": "in flight",
    "gather": "in flight: all_gather",
    "wait": "standing still",
    "exposed": "exposed",
}
_RARE = {"input", "weight", "update", "span", "gather"}  # in the legend of runs that have them
PARTS_OF_MODELS = ("layer ", "block ")  # how spans of layers, and of blocks of a ring, begin


@dataclass(frozen=True)
class SpanFigures:
    """All spans of one name on all ranks; times and bytes are means of one of them."""

    name: str
    count: int
    ms: float
    operations: dict[str, int]  # of all spans together
    bytes: float
    communication_ms: float
    exposed_ms: float

    @property
    def exposed_share(self) -> float:
        """The share of the span's time that is exposed."""
        return self.exposed_ms / self.ms if self.ms else 0.0


@dataclass
class _Sum:
    first_ns: int
    ms: list[float] = field(default_factory=list)
    operations: Counter[str] = field(default_factory=Counter)
    bytes: int = 0
    communication_ns: int = 0
    exposed_ns: int = 0


def spans_of(run: Run) -> list[SpanFigures]:
    """The spans in which something was communicated, in the order in which they first began."""
    sums: dict[str, _Sum] = {}
    for rank in run.ranks:
        by_name: dict[str, list[Event]] = {}
        for event in rank.compute:
            if name := _counted_as(event.name):
                by_name.setdefault(name, []).append(event)
        if by_name:
            _add(sums, rank, by_name)
    found = sorted(sums.items(), key=lambda item: item[1].first_ns)
    return [
        SpanFigures(
            name=name,
            count=len(of.ms),
            ms=statistics.fmean(of.ms),
            operations=dict(of.operations.most_common()),
            bytes=of.bytes / len(of.ms),
            communication_ms=of.communication_ns * 1e-6 / len(of.ms),
            exposed_ms=of.exposed_ns * 1e-6 / len(of.ms),
        )
        for name, of in found
        if of.operations
    ]


def colour_of(name: str) -> str:
    """The colour that a span with this name has in drawings, by its name in the style sheet."""
    if (action := Action.of(name)) is not None:
        return {"F": "forward", "B": "backward", "I": "input", "W": "weight"}[action.kind]
    if name.startswith(PARTS_OF_MODELS):
        return "backward" if name.endswith(" back") else "forward"
    return name if name in ("forward", "backward", "update") else "span"


def legend_of(runs: Sequence[Run]) -> dict[str, str]:
    """What the colours of these runs mean, by their names in the style sheet."""
    ranks = [rank for run in runs for rank in run.ranks]
    shown = {colour_of(event.name) for rank in ranks for event in rank.compute}
    if any(event.name == "all_gather" for rank in ranks for event in rank.operations):
        shown.add("gather")
    return {name: text for name, text in _LEGEND.items() if name in shown or name not in _RARE}


@functools.lru_cache(maxsize=4096)  # names repeat in every step
def _counted_as(name: str) -> str:
    """Nothing where other figures tell more."""
    action = Action.of(name)
    if action is not None:
        return f"stage {action.stage}, {_PASSES[action.kind]}"
    return "" if name in _OF_MODELS or block_of(name) else name


def _add(sums: dict[str, _Sum], rank: RankEvents, by_name: dict[str, list[Event]]) -> None:
    communication, exposed = union_of(rank.operations), union_of(rank.exposed)
    sent = np.array([event.begin_ns for event in rank.operations], np.int64)  # in order of time
    for name, events in by_name.items():
        begins = np.array([event.begin_ns for event in events], np.int64)
        ends = np.array([event.end_ns for event in events], np.int64)
        mine = sums.setdefault(name, _Sum(events[0].begin_ns))
        mine.first_ns = min(mine.first_ns, events[0].begin_ns)
        mine.ms += [event.ms for event in events]
        mine.communication_ns += _inside(communication, begins, ends)
        mine.exposed_ns += _inside(exposed, begins, ends)
        for first, last in zip(
            np.searchsorted(sent, begins), np.searchsorted(sent, ends), strict=True
        ):
            inside: Sequence[Event] = rank.operations[first:last]
            mine.operations.update(event.name for event in inside)
            mine.bytes += sum(event.bytes for event in inside)


def _inside(times: Intervals, begins: np.ndarray, ends: np.ndarray) -> int:
    return int((times.covered_until(ends) - times.covered_until(begins)).sum())
