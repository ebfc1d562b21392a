"""Ranks that end at different times write one trace file together.

A rank that ends reads what the others have written, adds itself and writes the file anew, under a
lock on the folder, so that nothing lies beside the file, whenever a rank is killed. What an earlier
run has left at the path is replaced: it bears another name, or ended before this run began.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dpcore.files import write_whole
from dpcore.recorder.file import SAME_CLOCK_NS


def add(path: Path, part: dict[str, Any], run: str, began_ns: int) -> set[int]:
    """Adds the content of a file with one rank to the file of ``run`` at ``path``. ``began_ns``:
    a time (of the Unix clock) that is before the end of any rank of the run. Returns the ranks
    that the file shows now."""
    with _alone_in(path.parent):
        before = _of_run(path, run, began_ns)
        if before is not None and shown_ranks(before) & shown_ranks(part):
            before = None  # of the same name, and yet another run
        content = part if before is None else joined(before, part)
        content["otherData"].update(run=run, endedNanoseconds=time.time_ns())
        write_whole(path, json.dumps(content, separators=(",", ":")))
    return shown_ranks(content)


def shown_ranks(content: dict[str, Any]) -> set[int]:
    return {event["pid"] for event in content["traceEvents"]}


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _of_run(path: Path, run: str, began_ns: int) -> dict[str, Any] | None:
    try:
        content: dict[str, Any] = json.loads(path.read_bytes())
        said = content["otherData"]
        return content if said["run"] == run and said["endedNanoseconds"] >= began_ns else None
    except (FileNotFoundError, ValueError, KeyError, TypeError):  # none, or something else's
        return None


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """One file of two that show different ranks, on the clock of whichever began earlier.

    On one host both have the same monotonic clock. Those of different hosts are as far apart as
    their Unix clocks say.
    """
    ahead = _monotonic_base(second) - _monotonic_base(first)
    if abs(_unix_of_monotonic(second) - _unix_of_monotonic(first)) > SAME_CLOCK_NS:
        ahead = second["baseTimeNanoseconds"] - first["baseTimeNanoseconds"]
    early, late = (first, second) if ahead >= 0 else (second, first)
    for event in late["traceEvents"]:
        if event["ph"] != "M":
            event["ts"] = round(event["ts"] + abs(ahead) / 1000, 3)
    events = sorted([*first["traceEvents"], *second["traceEvents"]], key=lambda event: event["pid"])
    facts = {**second["otherData"], **first["otherData"]}
    if min(map(int, second["otherData"]["dropped"])) == 0:  # models are described by rank 0
        facts.update({name: second["otherData"][name] for name in ("models", "machine")})
    for name in ("dropped", "schedules"):
        facts[name] = {**first["otherData"][name], **second["otherData"][name]}
    facts["monotonicBaseNanoseconds"] = _monotonic_base(early)
    if errors := [said for part in (first, second) if (said := part["otherData"].get("error"))]:
        facts["error"] = min(errors, key=_is_of_another)
    return {
        **early,
        "traceEvents": events,
        "distributedInfo": first["distributedInfo"],
        "otherData": facts,
    }


def _is_of_another(error: str) -> bool:
    """Of a rank that lost one which had an error of its own, or was killed. It may end first."""
    return error.split(": ")[1] == "PeerLost"


def _monotonic_base(content: dict[str, Any]) -> int:
    return int(content["otherData"]["monotonicBaseNanoseconds"])


def _unix_of_monotonic(content: dict[str, Any]) -> int:
    return int(content["baseTimeNanoseconds"]) - _monotonic_base(content)
