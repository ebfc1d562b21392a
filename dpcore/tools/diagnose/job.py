"""A job as one host knows it, from the black boxes that can be read there.

``families`` puts together what the processes of this host know: their own boxes, and what ranks of
other hosts have told them. Ranks that met in one ``init()`` are a family.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dpcore.base.processes import look_at
from dpcore.errors import Error
from dpcore.tools.diagnose import black_box

# A rank that waits shows life fifty times a second, any other one once a second.
SILENT_SECONDS = 3.0

Box = Mapping[str, Any]


@dataclass
class Rank:
    """What is known of a rank: one box per group that it is in, by the group's name."""

    number: int
    boxes: dict[int, Box] = field(default_factory=dict)
    process: int | None = None  # on this host
    state: str = ""  # of that process, a letter: see base/processes.py
    silent_seconds: float | None = None  # of a rank of another host; None: unknown on this host

    @property
    def is_stopped(self) -> bool:
        return self.state in ("T", "t")

    @property
    def is_silent(self) -> bool:
        return self.silent_seconds is not None and self.silent_seconds > SILENT_SECONDS

    @property
    def where(self) -> Mapping[str, Any] | None:
        root = self.boxes.get(0)
        return None if root is None else root["where"]

    @property
    def name(self) -> str:
        if self.process is not None:
            return f"rank {self.number} (process {self.process} on this host)"
        return f"rank {self.number} (on another host)"


@dataclass
class Family:
    job: str
    world: int
    ranks: dict[int, Rank]
    members: dict[int, dict[int, int]]  # by group and rank in it, the rank in init()

    @property
    def processes(self) -> set[int]:
        """The family's processes on this host."""
        return {rank.process for rank in self.ranks.values() if rank.process is not None}

    def group_text(self, group: int) -> str:
        """How the group is called in a sentence: nothing for the one of init()."""
        if group == 0:
            return ""
        ranks = [str(rank) for _, rank in sorted(self.members[group].items())]
        listed = ", ".join(ranks[:8]) + (", ..." if len(ranks) > 8 else "")
        return f" of group {group & 0xFFFFFFFF} of ranks {listed}"


def beside(asked: Sequence[int], pids: Sequence[int]) -> list[int]:
    """The processes that share a host with one that was asked for: its network namespace."""
    hosts = {_host_of(pid) for pid in asked}
    return [*asked, *(pid for pid in pids if pid not in asked and _host_of(pid) in hosts)]


def _host_of(pid: int) -> int:
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return -pid  # no other rank is there


def families(pids: Iterable[int]) -> tuple[list[Family], dict[int, str]]:
    """All that the processes know of themselves and of others, by the ``init()`` they met in; and
    why some can't be read."""
    found: dict[str, Family] = {}
    mirrors: list[tuple[Box, bool]] = []
    problems = {}
    for pid in pids:
        try:
            own, told = black_box.read(pid), black_box.read_mirrors(pid)
        except Error as problem:
            problems[pid] = str(problem)
            continue
        seen = look_at(pid)
        state = "" if seen is None else seen.state
        for box in own:
            family = _family_of(found, box)
            rank = family.ranks.setdefault(box["member"], Rank(box["member"]))
            rank.boxes[box["group"]] = box
            rank.process, rank.state = pid, state
            family.members.setdefault(box["group"], {})[box["rank"]] = box["member"]
        hears = state not in ("T", "t") and any(_is_awake(box) for box in own)
        mirrors += [(box, hears) for box in told]
    for mirror, hears in mirrors:
        family = _family_of(found, mirror)
        rank = family.ranks.setdefault(mirror["member"], Rank(mirror["member"]))
        family.members.setdefault(mirror["group"], {})[mirror["rank"]] = mirror["member"]
        known = rank.boxes.get(mirror["group"])
        if rank.process is not None:
            continue
        if known is None or age_of(mirror) < age_of(known):
            rank.boxes[mirror["group"]] = mirror
        if hears:  # a process that takes nothing in knows nothing about silence
            ages = [age for age in (rank.silent_seconds, age_of(mirror)) if age is not None]
            rank.silent_seconds = min(ages)
    return list(found.values()), problems


def _family_of(found: dict[str, Family], box: Box) -> Family:
    family = found.setdefault(box["job"], Family(box["job"], 0, {}, {}))
    if box["group"] == 0:
        family.world = box["world_size"]
    return family


def age_of(box: Box) -> float:
    """Seconds since the rank was last heard, or looked up from a wait."""
    age = box["alive_seconds_ago"]
    return float("inf") if age is None else age


def _is_awake(box: Box) -> bool:
    where = box["where"]
    looked = [age_of(box), float("inf") if where is None else where["seen_seconds_ago"]]
    return min(looked) < SILENT_SECONDS
