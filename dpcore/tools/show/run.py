"""A run: what its ranks did, sorted by rank and kind.

Times are nanoseconds after the first event of the run, the same clock for all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from dpcore.recorder.file import Event
from dpcore.recorder.profiled import ProfileFacts


@dataclass
class RankEvents:
    """The events of one rank, each list in order of time. ``operation_lanes``, ``wait_lanes``: the
    lane in which the file draws each operation and each wait. ``steps``: begin and end of each,
    where the file says more than its forwards do."""

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
    steps: list[tuple[int, int]] = field(default_factory=list)
    dropped: int = 0
    host: str = ""
    facts: ProfileFacts | None = None  # of a file of torch's profiler

    @property
    def end_ns(self) -> int:
        """When the last event ends."""
        lists = (self.compute, self.exposed, self.operations, self.waits)
        moments = (self.ready, self.launches, self.marks)
        return max((e.end_ns for events in (*lists, *moments) for e in events), default=0)


@dataclass
class Run:
    """One trace file, or the files of all ranks."""

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
    title: str = ""  # of a run whose file is not called like it
    about: str = ""  # in place of the machine
    commit: str = ""  # of the program that was traced

    @property
    def name(self) -> str:
        """What the run is called beside another one."""
        return self.title or self.path.stem

    @cached_property
    def end_ns(self) -> int:
        """When the last event ends."""
        return max(rank.end_ns for rank in self.ranks)


def rank_events(rank: int, found: Sequence[tuple[Event, int]]) -> RankEvents:
    """A rank with these events; beside each, the track that it is drawn in."""
    ordered = sorted(found, key=lambda pair: pair[0].begin_ns)
    tracks = sorted({track for event, track in ordered if event.kind in ("operation", "wait")})
    lanes = {track: lane for lane, track in enumerate(tracks)}  # numbered per rank
    events = RankEvents(rank)
    lists = {
        "compute": events.compute,
        "exposed": events.exposed,
        "operation": events.operations,
        "wait": events.waits,
        "ready": events.ready,
        "launch": events.launches,
        "mark": events.marks,
    }
    for event, track in ordered:
        lists[event.kind].append(event)
        if event.kind == "operation":
            events.operation_lanes.append(lanes[track])
        elif event.kind == "wait":
            events.wait_lanes.append(lanes[track])
    return events
