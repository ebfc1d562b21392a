"""What ``dpcore chaos`` hears of a rank: a line for each step that it finishes, cuts or comes to.

Its address is in DPCORE_CHAOS, a datagram socket in a folder. Without it nothing is said. A rank
never waits for the command to listen: what the socket does not take goes before the next line.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any

VARIABLE = "DPCORE_CHAOS"
_MOST_UNSENT = 1 << 16


def teller() -> Callable[..., None] | None:
    """A function that says something, with the time and this process's number; or None."""
    address = os.environ.get(VARIABLE)
    return _teller_to(address) if address else None


@cache
def _teller_to(address: str) -> Callable[..., None]:
    """One for all who tell, so that lines come in the order in which they were said."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    line.setblocking(False)
    unsent: deque[bytes] = deque(maxlen=_MOST_UNSENT)

    def tell(what: str, **facts: Any) -> None:
        said = {"what": what, "process": os.getpid(), "at": time.monotonic(), **facts}
        unsent.append(json.dumps(said).encode())
        with contextlib.suppress(OSError):  # dpcore chaos has ended, or does not listen now
            while unsent:
                line.sendto(unsent[0], address)
                unsent.popleft()

    return tell
