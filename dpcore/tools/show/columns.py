"""The lanes of a run as columns of whole numbers, which a page can hold by the million.

An event of the page is a row of up to seven numbers: begin, duration, label, number and, of a
bucket, when it was full, when it was sent and how much of it was exposed. Begins are stored as
differences; the bytes of a column lie plane by plane, all lowest bytes first, since then they
compress to a tenth. Texts repeat in every step: an event holds the number of its label, and each
label is there once.

Times are ticks of 1, 10, 100, ... ns, the finest in which the whole run fits 32 bits.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from dpcore.parallel.pipeline_costs import Action
from dpcore.recorder.file import Event
from dpcore.recorder.intervals import Intervals
from dpcore.tools.show.buckets import (
    BucketSpan,
    bucket_spans,
    gradient_name,
    model_name,
    pack_lanes,
    parameters_of,
)
from dpcore.tools.show.figures import communication_of, exposed_of
from dpcore.tools.show.pipelines import Message, messages_of
from dpcore.tools.show.run import RankEvents, Run
from dpcore.tools.show.schedules import DrawnSchedules, kind_of
from dpcore.tools.show.spans import colour_of

_LARGEST = (1 << 32) - 1


@dataclass
class Columns:
    """Collects lanes. ``labels`` and ``lanes`` are part of the page's JSON, ``packed()`` is the
    rest."""

    tick_ns: int
    labels: list[dict[str, Any]] = field(default_factory=list)
    lanes: list[dict[str, Any]] = field(default_factory=list)
    _number_of: dict[tuple[Any, ...], int] = field(default_factory=dict)
    _columns: list[np.ndarray[Any, np.dtype[np.uint32]]] = field(default_factory=list)

    def label(self, **content: Any) -> int:
        """The number of a label with this content."""
        known = {key: value for key, value in content.items() if value not in ("", None, ())}
        key = tuple(sorted(known.items()))
        if key not in self._number_of:
            self._number_of[key] = len(self.labels)
            self.labels.append(known)
        return self._number_of[key]

    def add(self, rank: int, kind: str, row: int, *columns: Sequence[int]) -> None:
        """A lane of events in order of time: begins and durations (in ns), labels, numbers; further
        columns are times after the begin."""
        begins, durations, labels, numbers, *times = (np.asarray(c, np.int64) for c in columns)
        if not len(begins):
            return
        ticks = begins // self.tick_ns
        spans = [durations // self.tick_ns, *(time // self.tick_ns for time in times)]
        differences = np.diff(ticks, prepend=0)
        parts = (differences, spans[0], labels, numbers & _LARGEST, *spans[1:])
        self._columns += [part.astype("<u4") for part in parts]
        self.lanes.append(
            {"rank": rank, "kind": kind, "row": row, "count": len(begins), "columns": len(parts)}
        )

    def packed(self) -> str:
        """All columns, compressed, as base64."""
        planes = [column.view(np.uint8).reshape(-1, 4).T.tobytes() for column in self._columns]
        return base64.b64encode(zlib.compress(b"".join(planes), 6)).decode()


def columns_of(run: Run, drawn: DrawnSchedules) -> Columns:
    """All lanes of a run. Labels of operations say where their moves are among the drawn ones."""
    columns = Columns(_tick_for(run.end_ns))
    for rank in run.ranks:
        _add_compute(columns, rank)
        _add_events(columns, rank.rank, "exposed", [0] * len(rank.exposed), rank.exposed)
        _add_union(columns, rank.rank, "communication", communication_of(rank))
        _add_union(columns, rank.rank, "waiting", exposed_of(rank))
        _add_gradients(columns, run, rank)
        _add_buckets(columns, run, rank, drawn)
        told = partial(_what_ran, run, drawn)
        _add_events(columns, rank.rank, "operation", rank.operation_lanes, rank.operations, told)
        _add_events(columns, rank.rank, "wait", rank.wait_lanes, rank.waits)
        _add_events(columns, rank.rank, "mark", [0] * len(rank.marks), rank.marks)
    _add_messages(columns, run)
    return columns


def _what_ran(run: Run, drawn: DrawnSchedules, event: Event) -> dict[str, Any]:
    """For the label of an operation: its path in words, and the place of its moves. An earlier file
    knows the path where all operations of the collective took the same one."""
    path = event.path
    if not path and len(run.paths.get(event.name, {})) == 1:
        (path,) = run.paths[event.name]
    root = f", root {event.root}" if path and event.root >= 0 else ""
    return {"path": path + root, "moves": drawn.drawing_of(run, event)}


def _tick_for(end_ns: int) -> int:
    tick = 1
    while end_ns // tick > _LARGEST:
        tick *= 10
    return tick


def _add_compute(columns: Columns, rank: RankEvents) -> None:
    """Spans lie inside each other: each in the first row that is free, so outer ones come first."""
    free_from: list[int] = []
    rows = []
    events = sorted(rank.compute, key=lambda e: (e.begin_ns, -e.end_ns))
    for event in events:
        row = next((i for i, end in enumerate(free_from) if end <= event.begin_ns), len(free_from))
        free_from[row:] = [event.end_ns]
        rows.append(row)
    _add_events(columns, rank.rank, "compute", rows, events, _about_compute)


def _about_compute(event: Event) -> dict[str, Any]:
    """For the label: its colour, and of a pass of a pipeline stage, kind and micro-batch."""
    action, colour = Action.of(event.name), {"colour": colour_of(event.name)}
    return colour if action is None else colour | {"pass": tuple(action)}


def _add_messages(columns: Columns, run: Run) -> None:
    """A lane for each rank that sends: from a send to the end of its receive, whose rank is the
    number of the event. Messages may be on their way at once."""
    by_source: dict[int, list[Message]] = {}
    for message in messages_of(run):
        by_source.setdefault(message.source, []).append(message)
    for source, mine in by_source.items():
        columns.add(
            source,
            "message",
            0,
            [message.begin_ns for message in mine],
            [max(0, message.end_ns - message.begin_ns) for message in mine],
            [columns.label(n="message", b=message.bytes) for message in mine],
            [message.target for message in mine],
        )


def _add_gradients(columns: Columns, run: Run, rank: RankEvents) -> None:
    labels = {
        (model, number): columns.label(n=gradient_name(run, number, model), b=nbytes)
        for model, number, nbytes in {(e.model, e.operation, e.bytes) for e in rank.ready}
    }
    numbers = [event.operation for event in rank.ready]
    begins = [event.begin_ns for event in rank.ready]
    nothing = [0] * len(begins)
    names = [labels[event.model, event.operation] for event in rank.ready]
    columns.add(rank.rank, "gradient", 0, begins, nothing, names, numbers)


def _add_events(
    columns: Columns,
    rank: int,
    kind: str,
    rows: Sequence[int],
    events: Sequence[Event],
    told: Callable[[Event], dict[str, Any]] = lambda event: {},
) -> None:
    by_row: dict[int, list[Event]] = {}
    for row, event in zip(rows, events, strict=True):
        by_row.setdefault(row, []).append(event)
    known: dict[tuple[Any, ...], int] = {}
    for row, mine in sorted(by_row.items()):
        labels = []
        for event in mine:
            key = event.bytes, event.peer, *kind_of(event)
            if key not in known:
                known[key] = columns.label(
                    n=event.name,
                    b=event.bytes or None,
                    peer=event.peer if event.peer >= 0 else None,
                    **told(event),
                )
            labels.append(known[key])
        begins = [event.begin_ns for event in mine]
        durations = [event.end_ns - event.begin_ns for event in mine]
        columns.add(rank, kind, row, begins, durations, labels, [e.operation for e in mine])


def _add_union(columns: Columns, rank: int, kind: str, spans: Intervals) -> None:
    nothing = [0] * len(spans.begins)
    begins, durations = spans.begins.tolist(), (spans.ends - spans.begins).tolist()
    columns.add(rank, kind, 0, begins, durations, nothing, nothing)


def _add_buckets(columns: Columns, run: Run, rank: RankEvents, drawn: DrawnSchedules) -> None:
    spans = bucket_spans(run, rank)
    lanes = pack_lanes(spans)
    names: dict[tuple[Any, ...], int] = {}
    for lane in range(max(lanes, default=-1) + 1):
        mine = [span for span, at in zip(spans, lanes, strict=True) if at == lane]
        labels = []
        for span in mine:
            sent_by = span.sent_by
            ran = kind_of(sent_by) if sent_by is not None else ()
            key = span.model, span.bucket, span.bytes, *ran
            if key not in names:
                names[key] = columns.label(
                    n=f"bucket {span.bucket}",
                    b=span.bytes,
                    of=_contents(run, span),
                    phase=span.phase,
                    **(_what_ran(run, drawn, sent_by) if sent_by is not None else {}),
                )
            labels.append(names[key])
        begins = [span.first_ready_ns for span in mine]
        columns.add(
            rank.rank,
            "bucket",
            lane,
            begins,
            [span.end_ns - span.first_ready_ns for span in mine],
            labels,
            [span.operation for span in mine],
            [span.last_ready_ns - span.first_ready_ns for span in mine],
            [span.launch_ns - span.first_ready_ns for span in mine],
            [span.exposed_ns for span in mine],
        )


def _contents(run: Run, span: BucketSpan) -> str:
    names = parameters_of(run, span.bucket, span.bytes, span.model)
    model = model_name(run, span.model)
    return f"{names} of {model}" if names and model else names
