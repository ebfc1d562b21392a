"""Events of a trace, and the file that chrome://tracing and ui.perfetto.dev open.

Between the thread that does something and the page that shows it, an event has four forms:

1. ``TraceEvent`` in a ring of the core (csrc/comm/group/trace.h).
2. ``Event``, from the end of the recording on. Ranks send theirs to rank 0, and every figure is
   computed from them. What torch's profiler has seen becomes events, too (profile_events.py).
3. An entry of the file, which is written here and read by tools/show/reading.py.
4. A row of the page's columns (tools/show/columns.py).

A file shows one process per rank. In it there is a track per thread, with what the thread's
callers see (user spans, and *exposed* time: the thread sat in a communication call), and tracks
called "operations" with what was in flight: each operation from its submission to its
completion, and inside of it the waits, named by what was missing. Operations may overlap, spans
of one track may not, so there are as many of these tracks as operations in flight at once.

An operation carries ``path``, ``world``, ``root`` if it has one, and ``schedule`` if it ran a list
of moves: the number of that list in ``otherData.schedules``. Files of earlier versions, and
operations whose path is unknown, lack these fields.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dpcore._version import __version__
from dpcore.base.files import write_whole
from dpcore.base.machine import commit_of, machine
from dpcore.recorder.profiled import ProfileFacts, facts_from

# Thread numbers of Linux are below 2**22: tracks that are not threads are numbered from there on.
_FIRST_TRACK = (1 << 22) + 1
# The "thread" of events on a device's stream. No thread of a program has this number.
DEVICE_TRACK = 0
# A step of the optimizer under LocalSGD or DiLoCo, from the end of the former one.
LOCAL_STEP = "local step"
# For larger worlds the file names only the algorithm: lists grow with the square of the ranks.
_LARGEST_LISTED_WORLD = 32
_SAME_CLOCK_NS = 1_000_000_000  # hosts that were booted less than a second apart are rare


class Event(NamedTuple):
    """One span or moment of a trace.

    ``kind``  operation: from submission to completion. wait: an operation made no progress;
              ``name`` says what it waited for, ``peer`` which rank. exposed: a thread sat in a
              communication call. ready: a gradient is in its bucket. launch: a bucket was sent.
              compute, mark: recorded by the program; forward and backward of a DataParallel.
    ``operation``  the operation's number in the communicator. For send and recv the tag, with the
              other rank as ``peer``; for ready and launch the gradient's or bucket's number.
    ``path``  for operations: the algorithm and how its data travelled, "two_shot/push" or
              "ring/moves", or "" if unknown. ``world`` is the communicator's, ``root`` the
              call's (-1: none), and ``schedule`` the number of its list of moves.
    ``model``  for ready, launch, forward, backward and local steps: the number of the DataParallel
              or block in ``otherData.models``. 0: none, or unknown.
    Times are nanoseconds of CLOCK_MONOTONIC, which all processes of a host share.
    """

    name: str
    kind: str
    peer: int
    thread: int
    operation: int
    bytes: int
    begin_ns: int
    end_ns: int
    path: str = ""
    schedule: str = ""
    root: int = -1
    world: int = 0
    model: int = 0

    @property
    def ms(self) -> float:
        """How long it took, in milliseconds."""
        return (self.end_ns - self.begin_ns) * 1e-6

    def moved(self, by_ns: int) -> Event:
        return self._replace(begin_ns=self.begin_ns + by_ns, end_ns=self.end_ns + by_ns)


def unix_minus_monotonic() -> int:
    """In nanoseconds, on this host."""
    return time.time_ns() - time.monotonic_ns()


@dataclass
class RankRecord:
    """One rank's contribution to the file. ``schedules``: the results of ``describe`` for the
    lists of moves that its events name."""

    rank: int
    process: int
    threads: dict[int, str]
    dropped: int
    events: list[Event]
    schedules: dict[str, dict[str, Any]] = field(default_factory=dict)
    unix_minus_monotonic: int = field(default_factory=unix_minus_monotonic)  # of its host
    profiled: ProfileFacts | None = None  # what torch's profiler showed beside the events


def describe(schedule: Any) -> dict[str, Any]:
    """The file's form of a schedule of the core, or of a ``dpcore.reference.Schedule``."""
    description = {
        name: getattr(schedule, name)
        for name in ("algorithm", "collective", "world", "root", "chunks", "ordered")
    }
    if schedule.world <= _LARGEST_LISTED_WORLD:
        description["moves"] = [[int(part) for part in move] for move in schedule.moves]
    return description


# ---- the file --------------------------------------------------------------------------------


def write(
    path: Path, records: Sequence[RankRecord], world_size: int, facts: Mapping[str, Any]
) -> None:
    """Writes the file whole, or leaves the previous one in place."""
    content = chrome_trace(records, world_size, facts)
    write_whole(path, json.dumps(content, separators=(",", ":")))


def chrome_trace(
    records: Sequence[RankRecord], world_size: int, facts: Mapping[str, Any]
) -> dict[str, Any]:
    """The content of the file. ``facts`` join ``otherData``."""
    known = {
        "program": "dpcore",
        "version": __version__,
        "machine": machine(),
        "commit": commit_of(_program_folder()),
        **facts,
    }
    return joined([_of_rank(record, world_size, known) for record in records])


def _of_rank(record: RankRecord, world_size: int, facts: Mapping[str, Any]) -> dict[str, Any]:
    base_ns = min((event.begin_ns for event in record.events), default=time.monotonic_ns())
    return {
        "traceEvents": list(_entries(record, base_ns)),
        "displayTimeUnit": "ms",
        # Unix time at ts 0, as in the files of torch's profiler, so that both can be merged.
        "baseTimeNanoseconds": base_ns + record.unix_minus_monotonic,
        "distributedInfo": {
            "backend": facts.get("backend", "native"),
            "world_size": world_size,
        },
        "otherData": {
            "dropped": {str(record.rank): record.dropped},
            "monotonicBaseNanoseconds": base_ns,
            "schedules": record.schedules,
            **_profiled(record, -base_ns),
            **facts,
        },
    }


def _profiled(record: RankRecord, by_ns: int) -> dict[str, Any]:
    """In nanoseconds after ts 0."""
    if record.profiled is None:
        return {}
    return {"profiled": {str(record.rank): asdict(record.profiled.moved(by_ns))}}


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One content of several that show different ranks, on the clock of whichever began first.

    On one host all have the same monotonic clock. Those of different hosts are as far apart as
    their Unix clocks say.
    """
    begins = [_begin_after(parts[0], part) for part in parts]
    for part, begin in zip(parts, begins, strict=True):
        if late_ns := begin - min(begins):
            for entry in part["traceEvents"]:
                if entry["ph"] != "M":
                    entry["ts"] = round(entry["ts"] + late_ns / 1000, 3)
            other = part["otherData"]
            for rank, content in other.get("profiled", {}).items():
                other["profiled"][rank] = asdict(facts_from(content).moved(late_ns))
    early = parts[begins.index(min(begins))]
    others = [part["otherData"] for part in parts]
    # Of what all say, the first; models are described by rank 0.
    facts = {name: value for other in reversed(others) for name, value in other.items()}
    for other in others:
        if "0" in other["dropped"]:
            facts.update({name: other[name] for name in ("models", "machine") if name in other})
    for name in ("dropped", "schedules", *["profiled"] * ("profiled" in facts)):
        facts[name] = {key: v for other in others for key, v in other.get(name, {}).items()}
    facts["monotonicBaseNanoseconds"] = early["otherData"]["monotonicBaseNanoseconds"]
    if errors := [other["error"] for other in others if other.get("error")]:
        facts["error"] = min(errors, key=_is_of_another)
    entries = [entry for part in parts for entry in part["traceEvents"]]
    return {
        **early,
        "traceEvents": sorted(entries, key=lambda entry: entry["pid"]),
        "distributedInfo": parts[0]["distributedInfo"],
        "otherData": facts,
    }


def _is_of_another(error: str) -> bool:
    """Of a rank that lost one which had an error of its own, or was killed. It may end first."""
    return error.split(": ")[1:2] == ["PeerLost"]


def _begin_after(first: Mapping[str, Any], part: Mapping[str, Any]) -> int:
    """How long after another one a content begins, in nanoseconds."""
    by_unix: int = part["baseTimeNanoseconds"] - first["baseTimeNanoseconds"]
    monotonic = "monotonicBaseNanoseconds"
    by_monotonic: int = part["otherData"][monotonic] - first["otherData"][monotonic]
    return by_unix if abs(by_unix - by_monotonic) > _SAME_CLOCK_NS else by_monotonic


def _program_folder() -> Path:
    """The folder of the traced program's file, or the working directory if it has no file."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(file).absolute().parent if file else Path.cwd()


def _entries(record: RankRecord, base_ns: int) -> Iterator[dict[str, Any]]:
    tracks = {thread: (name, index) for index, (thread, name) in enumerate(record.threads.items())}
    lanes = assign_lanes(record.events)
    for lane in range(max(lanes.values(), default=-1) + 1):
        name = f"operations {lane + 1}" if lane > 0 else "operations"
        tracks[_FIRST_TRACK + lane] = (name, len(tracks))
    name = f"rank {record.rank} (process {record.process})"
    yield _metadata(record.rank, 0, "process_name", name=name)
    yield _metadata(record.rank, 0, "process_sort_index", sort_index=record.rank)
    for track, (name, index) in tracks.items():
        yield _metadata(record.rank, track, "thread_name", name=name)
        yield _metadata(record.rank, track, "thread_sort_index", sort_index=index)
    for index, event in enumerate(record.events):
        track = _FIRST_TRACK + lanes[index] if index in lanes else event.thread
        yield _entry(record.rank, track, event, base_ns)


def _metadata(rank: int, track: int, key: str, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": track, "ts": 0, "name": key, "args": args}


def _entry(rank: int, track: int, event: Event, base_ns: int) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "ph": "X",
        "pid": rank,
        "tid": track,
        "cat": event.kind,
        "name": f"wait for {event.name}" if event.kind == "wait" else event.name,
        "ts": round((event.begin_ns - base_ns) / 1000, 3),
    }
    if event.kind in ("mark", "ready", "launch"):  # moments
        entry.update(ph="i", s="t")
        if event.kind != "mark":
            entry["args"] = {"number": event.operation, "bytes": event.bytes}
        return _with_model(entry, event)
    entry["dur"] = round((event.end_ns - event.begin_ns) / 1000, 3)
    if event.kind != "compute":
        entry["args"] = {"operation": event.operation, "bytes": event.bytes}
        if event.peer >= 0:
            entry["args"]["peer"] = event.peer
        if event.path:
            entry["args"].update(_what_ran(event))
        if track != event.thread:
            entry["args"]["thread"] = event.thread
    return _with_model(entry, event)


def _with_model(entry: dict[str, Any], event: Event) -> dict[str, Any]:
    if event.model:
        entry.setdefault("args", {})["model"] = event.model
    return entry


def _what_ran(event: Event) -> dict[str, Any]:
    said: dict[str, Any] = {"path": event.path, "world": event.world}
    if event.root >= 0:
        said["root"] = event.root
    if event.schedule:
        said["schedule"] = event.schedule
    return said


def assign_lanes(events: Sequence[Event]) -> dict[int, int]:
    """The lane of each operation and wait, by index. Spans of one lane nest or do not overlap.

    An operation takes the first lane that is free when it begins. A wait goes into the lane of its
    operation, or into a free one if the ring has dropped that operation.

    >>> a = Event("all_reduce", "operation", -1, 1, 0, 8, 0, 10)
    >>> b = a._replace(operation=1, begin_ns=5, end_ns=15)
    >>> wait = a._replace(kind="wait", begin_ns=2, end_ns=9)
    >>> assign_lanes([a, b, wait])
    {0: 0, 2: 0, 1: 1}
    """
    open_spans: list[list[Event]] = []
    chosen: dict[int, int] = {}
    placed = [i for i, event in enumerate(events) if event.kind in ("operation", "wait")]
    for index in sorted(placed, key=lambda i: (events[i].begin_ns, -events[i].end_ns)):
        event = events[index]
        for spans in open_spans:
            while spans and spans[-1].end_ns <= event.begin_ns:
                spans.pop()
        lane = _lane_for(event, open_spans)
        if lane == len(open_spans):
            open_spans.append([])
        open_spans[lane].append(event)
        chosen[index] = lane
    return chosen


def _lane_for(event: Event, open_spans: Sequence[Sequence[Event]]) -> int:
    if event.kind == "wait":
        for lane, spans in enumerate(open_spans):
            mine = spans and spans[0].kind == "operation" and spans[0].operation == event.operation
            if mine and spans[-1].end_ns >= event.end_ns:
                return lane
    free = (lane for lane, spans in enumerate(open_spans) if not spans)
    return next(free, len(open_spans))
