"""Reads a file of ``dpcore.trace`` back into events, sorted by rank and kind.

Times are nanoseconds after the first event of the file, the same clock for all ranks.
"""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from dpcore.errors import Error
from dpcore.recorder.file import Event

_SPANS = ("operation", "wait", "exposed", "compute")
_MOMENTS = ("mark", "ready", "launch")
_WAIT = "wait for "


@dataclass
class RankEvents:
    """The events of one rank, each list in order of time. ``operation_lanes``, ``wait_lanes``: the
    lane in which the file draws each operation and each wait."""

    rank: int
    compute: list[Event] = field(default_factory=list)
    exposed: list[Event] = field(default_factory=list)
    operations: list[Event] = field(default_factory=list)
    waits: list[Event] = field(default_factory=list)
    ready: list[Event] = field(default_factory=list)
    launches: list[Event] = field(default_factory=list)
    marks: list[Event] = field(default_factory=list)
    operation_lanes: list[int] = field(default_factory=list)
    wait_lanes: list[int] = field(default_factory=list)
    dropped: int = 0

    @property
    def end_ns(self) -> int:
        """When the last event ends."""
        lists = (self.compute, self.exposed, self.operations, self.waits)
        moments = (self.ready, self.launches, self.marks)
        return max((e.end_ns for events in (*lists, *moments) for e in events), default=0)


@dataclass
class Run:
    """One trace file."""

    path: Path
    world_size: int
    backend: str
    version: str
    machine: Mapping[str, Any]
    transport: str
    link: str  # the words of an emulated one, or nothing
    error: str  # what ended the run, or nothing
    # Of files whose operations don't say what they ran: how many took which path, by collective.
    paths: Mapping[str, Mapping[str, int]]
    schedules: Mapping[str, Mapping[str, Any]]  # lists of moves, by the number that events give
    models: list[Mapping[str, Any]]
    ranks: list[RankEvents]

    @property
    def name(self) -> str:
        """What the run is called beside another one."""
        return self.path.stem

    @cached_property
    def end_ns(self) -> int:
        """When the last event ends."""
        return max(rank.end_ns for rank in self.ranks)


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """A million events are made and none is dropped: the garbage collector would look through all
    of them again and again, which takes longer than reading."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def read_run(path: Path) -> Run:
    """The run that a file of ``dpcore.trace`` has recorded."""
    with _without_collector():
        return _read(path)


def _read(path: Path) -> Run:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise Error(
            f"there is no file {path}. A trace is written by `with dpcore.trace({path.name!r}):`; "
            "after an error each rank writes its own, such as "
            f"{path.stem}.rank0{path.suffix or '.json'}"
        ) from None
    except (OSError, ValueError) as problem:
        raise Error(f"{path} is no trace: {problem}") from problem
    other = content.get("otherData", {}) if isinstance(content, dict) else {}
    if other.get("program") != "dpcore":
        raise Error(
            f"{path} was not written by dpcore.trace; traces of other programs can be opened with "
            "https://ui.perfetto.dev"
        )
    info = content.get("distributedInfo", {})
    ranks = _ranks(content["traceEvents"])
    if not ranks:
        raise Error(f"{path} has no events: nothing happened in the block of this trace")
    for rank in ranks:
        rank.dropped = int(other.get("dropped", {}).get(str(rank.rank), 0))
    return Run(
        path=path,
        world_size=int(info.get("world_size", len(ranks))),
        backend=str(info.get("backend", "")),
        version=str(other.get("version", "")),
        machine=other.get("machine", {}),
        transport=str(other.get("transport", "")),
        link=str(other.get("link", "")),
        error=str(other.get("error", "")),
        paths=other.get("paths", {}),
        schedules=other.get("schedules", {}),
        models=list(other.get("models", [])),
        ranks=ranks,
    )


def _ranks(entries: Iterable[Mapping[str, Any]]) -> list[RankEvents]:
    by_rank: dict[int, RankEvents] = {}
    lanes: dict[tuple[int, int], int] = {}  # the tracks of operations, numbered per rank
    spans: dict[int, list[tuple[Event, int]]] = {}
    for entry in entries:
        rank, kind = entry["pid"], entry.get("cat", "")
        if kind not in _SPANS and kind not in _MOMENTS:
            continue
        spans.setdefault(rank, []).append((_event(entry, kind), entry["tid"]))
    for rank, found in sorted(spans.items()):
        found.sort(key=lambda pair: pair[0].begin_ns)
        tracks = sorted({track for event, track in found if event.kind in ("operation", "wait")})
        lanes.update({(rank, track): lane for lane, track in enumerate(tracks)})
        events = by_rank[rank] = RankEvents(rank)
        lists = {
            "compute": events.compute,
            "exposed": events.exposed,
            "operation": events.operations,
            "wait": events.waits,
            "ready": events.ready,
            "launch": events.launches,
            "mark": events.marks,
        }
        for event, track in found:
            lists[event.kind].append(event)
            if event.kind == "operation":
                events.operation_lanes.append(lanes[rank, track])
            elif event.kind == "wait":
                events.wait_lanes.append(lanes[rank, track])
    return list(by_rank.values())


def _event(entry: Mapping[str, Any], kind: str) -> Event:
    args = entry.get("args", {})
    begin = round(entry["ts"] * 1000)
    name = entry["name"]
    return Event(
        name=name.removeprefix(_WAIT) if kind == "wait" else name,
        kind=kind,
        peer=args.get("peer", -1),
        thread=args.get("thread", entry["tid"]),
        operation=args.get("operation", args.get("number", 0)),
        bytes=args.get("bytes", 0),
        begin_ns=begin,
        end_ns=begin + round(entry.get("dur", 0) * 1000),
        path=args.get("path", ""),
        schedule=args.get("schedule", ""),
        root=args.get("root", -1),
        world=args.get("world", 0),
        model=args.get("model", 0),
    )
