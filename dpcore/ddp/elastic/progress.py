"""What ``dpcore chaos`` hears of a rank: a line for each step that it finishes, cuts or comes to.

Its address is in DPCORE_CHAOS, a datagram socket in a folder. Without it nothing is said.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable
from typing import Any

VARIABLE = "DPCORE_CHAOS"


def teller() -> Callable[..., None] | None:
    """A function that says something, with the time and this process's number; or None."""
    if not (address := os.environ.get(VARIABLE)):
        return None
    line = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def tell(what: str, **facts: Any) -> None:
        said = {"what": what, "process": os.getpid(), "at": time.monotonic(), **facts}
        with contextlib.suppress(OSError):  # dpcore chaos has ended
            line.sendto(json.dumps(said).encode(), address)

    return tell
