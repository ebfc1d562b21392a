"""The end of a program whose process groups are Gloo's.

A thread of Gloo lets go of an operation's tensors some time after the call has returned, and needs
Python's lock for that. If Python ends while the thread waits for the lock, Python ends the thread,
and the process with it: "terminate called without an active exception". So once a model or a
communicator has used such a group, the program's end waits until these threads rest.
"""

from __future__ import annotations

import atexit
import contextlib
import time
from pathlib import Path

_NAME = "pt_gloo_runloop"
_PATIENCE_SECONDS = 2.0
_SECONDS_BETWEEN_LOOKS = 0.01  # without Python's lock


def _seen() -> dict[str, list[str]]:
    """Of each of these threads, its state and how often it gave up its processor."""
    seen = {}
    for path in Path("/proc/self/task").glob("*/status"):
        with contextlib.suppress(OSError):  # it has ended
            name, *lines = path.read_text().splitlines()
            if name.endswith(f"\t{_NAME}"):
                seen[str(path)] = [x for x in lines if x.startswith("State") or "ctxt" in x]
    return seen


@atexit.register
def wait_until_they_rest() -> None:
    """Until each of them has slept between two looks, or has ended."""
    before, deadline = None, time.monotonic() + _PATIENCE_SECONDS
    while (now := _seen()) and time.monotonic() < deadline:
        if now == before and all("\tS" in state for state, *_ in now.values()):
            return
        before = now
        time.sleep(_SECONDS_BETWEEN_LOOKS)
