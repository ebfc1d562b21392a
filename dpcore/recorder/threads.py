"""Names of the threads that have events."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from dpcore.recorder.file import DEVICE_TRACK


def thread_names(used: set[int], comm: Any) -> dict[int, str]:
    """Names of these threads, this one first, and of the device's track."""
    of_python = {thread.native_id: thread.name for thread in threading.enumerate()}
    me = threading.get_native_id()
    names: dict[int, str] = {}
    for thread in sorted(used | {me}, key=lambda thread: (thread != me, thread)):
        if thread == DEVICE_TRACK:
            names[thread] = f"stream of {getattr(comm, 'device', 'the device')}"
            continue
        name = of_python.get(thread) or _name_of_native_thread(thread)
        names[thread] = "main" if name == "MainThread" else name
    return names


def _name_of_native_thread(thread: int) -> str:
    try:
        return Path(f"/proc/self/task/{thread}/comm").read_text().strip()
    except OSError:
        return f"thread {thread} (ended)"
