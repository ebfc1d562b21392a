"""Removes what a killed process leaves in memory: nothing of a benchmark may outlive it.

Libraries remove their shared files themselves when they end normally. Killed ones cannot: MPICH
leaves a file of some MiB each time. Open MPI's go with the private folder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SHARED = Path("/dev/shm")
_PREFIX = "dpcore-bench-"
_OF_LIBRARIES = (f"{SHARED}/mpich_shm_",)


@contextmanager
def private_folder() -> Iterator[Path]:
    """For sockets, logs and what libraries share; afterwards nothing is left in memory."""
    _remove_folders_of_dead_runs()
    parent = str(SHARED) if os.access(SHARED, os.W_OK) else None
    began = time.time()
    # The name says whose it is, so that a later run knows the folder of a dead one.
    with tempfile.TemporaryDirectory(
        prefix=f"{_PREFIX}{os.getpid()}-", dir=parent, ignore_cleanup_errors=True
    ) as folder:
        try:
            yield Path(folder)
        finally:
            _remove_unused_files(since=began)


def remove_own_files() -> None:
    """For a rank that is about to kill itself."""
    for name in _mapped("self"):
        if name.startswith(_OF_LIBRARIES):
            Path(name).unlink(missing_ok=True)


def _remove_folders_of_dead_runs() -> None:
    """A run ended by SIGKILL could not remove its own."""
    for folder in SHARED.glob(f"{_PREFIX}*-*"):
        owner = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(folder, ignore_errors=True)


def _remove_unused_files(since: float) -> None:
    """Files that a library has made during this run and that no process maps any more."""
    found = [file for pattern in _OF_LIBRARIES for file in Path("/").glob(f"{pattern[1:]}*")]
    if not found:
        return
    in_use = {name for entry in Path("/proc").glob("[0-9]*") for name in _mapped(entry.name)}
    for file in found:
        with contextlib.suppress(OSError):
            facts = file.stat()
            mine = facts.st_uid == os.getuid() and facts.st_mtime >= since
            if mine and str(file) not in in_use:
                file.unlink()


def _mapped(pid: str) -> set[str]:
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        return {fields[5] for line in lines if len(fields := line.split(maxsplit=5)) == 6}
    return set()
