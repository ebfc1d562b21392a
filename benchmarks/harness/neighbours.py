"""Noisy neighbours: a busy loop per processor, which a measurement starts and silences.

They are processes at the usual niceness, in the session of the one that starts them, since a
scheduler may give every session a share of its own. When their starter ends, however it does, their
standard input ends and so do they.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

# Silent, it sleeps in read(); busy, it looks at its input about every millisecond.
_BUSY = """
import os, select
while word := os.read(0, 1):
    os.write(1, word)
    while word == b"1" and not select.select([0], [], [], 0)[0]:
        for _ in range(20_000):
            pass
"""


class Neighbours:
    """Owned by one process; silent until they are told to be busy."""

    def __init__(self, count: int) -> None:
        self._loops = [
            subprocess.Popen(
                [sys.executable, "-S", "-c", _BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            for _ in range(count)
        ]

    def busy(self, loaded: bool) -> None:
        """Returns when all of them are, or are silent."""
        word = b"1" if loaded else b"0"
        for loop in self._loops:
            assert loop.stdin is not None
            os.write(loop.stdin.fileno(), word)
        for loop in self._loops:
            assert loop.stdout is not None
            if os.read(loop.stdout.fileno(), 1) != word:
                raise RuntimeError("a busy loop ended")

    def end(self) -> None:
        for loop in self._loops:
            loop.kill()
            loop.communicate()


@contextlib.contextmanager
def neighbours(count: int = len(os.sched_getaffinity(0))) -> Iterator[Neighbours]:
    """By default one per processor."""
    made = Neighbours(count)
    try:
        yield made
    finally:
        made.end()
