"""Ranks that end at different times write one trace file together.

A rank that ends reads the file that the others have written, adds its events and writes the file
again, under a lock on the folder: there is no lock file that a killed rank could leave behind. A
file of an earlier run is replaced: its run has another name, or ended before this run began.

Another program may hold a lock on the folder for long. After 30 seconds a rank stops waiting for
the lock and writes a file of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from dpcore.base.checked_json import Unreadable, read_json
from dpcore.base.files import write_whole
from dpcore.recorder.file import joined

_PATIENCE_SECONDS = 30.0
_PAUSE_SECONDS = 0.02


class FolderLocked(OSError):
    """Another process kept a lock on the folder. The message names the file written instead."""


def add(path: Path, part: dict[str, Any], run: str, began_ns: int) -> set[int]:
    """Adds one rank's file content to the file of ``run`` at ``path``. Returns the ranks that the
    file now shows. ``began_ns`` is a Unix time before the end of any rank of the run."""
    with _alone_in(path.parent) as has_lock:
        if not has_lock:
            _write_apart(path, part)
        before = _of_run(path, run, began_ns)
        if before is not None and shown_ranks(before) & shown_ranks(part):
            before = None  # of the same name, and yet another run
        content = part if before is None else joined([before, part])
        content["otherData"].update(run=run, endedNanoseconds=time.time_ns())
        write_whole(path, json.dumps(content, separators=(",", ":")))
    return shown_ranks(content)


def _write_apart(path: Path, part: dict[str, Any]) -> NoReturn:
    (rank,) = shown_ranks(part)
    own = path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
    write_whole(own, json.dumps(part, separators=(",", ":")))
    raise FolderLocked(
        f"another process has held a lock (flock) on the folder {path.parent} for "
        f"{_PATIENCE_SECONDS:g} s, so {path.name} does not show rank {rank}; {own} does"
    )


def shown_ranks(content: dict[str, Any]) -> set[int]:
    return {event["pid"] for event in content["traceEvents"]}


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[bool]:
    """Holds a lock on the folder. Yields False if it was not granted in time."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    ends_at = time.monotonic() + _PATIENCE_SECONDS
    try:
        while not (has_lock := _try_to_lock(descriptor)) and time.monotonic() < ends_at:
            time.sleep(_PAUSE_SECONDS)
        yield has_lock
    finally:
        os.close(descriptor)


def _try_to_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _of_run(path: Path, run: str, began_ns: int) -> dict[str, Any] | None:
    try:
        content: dict[str, Any] = read_json(path, "a trace")
        said = content["otherData"]
        return content if said["run"] == run and said["endedNanoseconds"] >= began_ns else None
    except (FileNotFoundError, Unreadable, KeyError, TypeError):  # no file, or not a trace of ours
        return None
