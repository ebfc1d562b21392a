"""Other processes of this host: what the kernel tells of them, and that of some the end is ours."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path
from typing import NamedTuple

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)  # opened here, since between fork and exec is no place for it
_TICK = os.sysconf("SC_CLK_TCK")


def end_with_parent(parent: int) -> None:
    """From now on the kernel kills this process when the thread that has started it is gone,
    however that ends: by SIGKILL too, after which nobody could tell it. A program that this process
    becomes by exec keeps that. ``parent`` may be gone already: then this ends at once."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


class Seen(NamedTuple):
    state: str  # "T" and "t": stopped; "Z" and "X": ended, though nobody may have waited for it yet
    parent: int
    group: int
    processor_seconds: float


def look_at(pid: int) -> Seen | None:
    """What is seen of a process from outside; None of one that is gone, or not for our eyes."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *numbers = text.rpartition(")")[2].split()  # behind its name, which may have blanks
    parent, group = map(int, numbers[:2])
    return Seen(state, parent, group, sum(map(int, numbers[10:12])) / _TICK)


def look_around() -> dict[int, Seen]:
    """What is seen of all processes, by their numbers."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return {pid: seen for pid in pids if (seen := look_at(pid)) is not None}


def is_running(pid: int) -> bool:
    seen = look_at(pid)
    return seen is not None and seen.state not in "ZX"
