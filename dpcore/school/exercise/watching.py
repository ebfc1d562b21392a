"""What dpcore's core did meanwhile: the witness of a check.

The core records operations itself, in C++, from their submission to their completion. The code that
is checked cannot write into this record, and the methods that read it were fetched before that code
was loaded.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

CAPACITY = 1 << 16


class Operation(NamedTuple):
    """A collective or a message that this rank took part in. Times are milliseconds."""

    name: str
    bytes: int
    begin: float
    end: float


class Watch:
    """``with`` it around what is to be seen; the results are there when the block has ended."""

    def __init__(self, start: Any, stop: Any, clock: Any, settle: Any) -> None:
        self._start, self._stop, self._clock, self._settle = start, stop, clock, settle
        self.operations: list[Operation] = []
        self.waits: list[tuple[float, float]] = []  # of threads, in a communication call
        self.has_model = False  # a DataParallel took part
        self.begin = self.end = 0.0

    def __enter__(self) -> Watch:
        self._start(CAPACITY)
        self.begin = self._clock()
        return self

    def __exit__(self, problem: object, *_: object) -> None:
        self.end = self._clock()
        if problem is None:
            self._settle()  # what is in flight is recorded when it is complete
        events, _, _ = self._stop()
        for name, what, _, _, _, nbytes, begin, end, *_ in events:
            if what == "operation":
                self.operations.append(Operation(name, nbytes, begin * 1e-6, end * 1e-6))
            elif what == "exposed":
                self.waits.append((begin * 1e-6, end * 1e-6))
            elif what in ("ready", "launch"):
                self.has_model = True
        self.operations.sort(key=lambda operation: operation.begin)

    def sent(self, *names: str) -> list[tuple[str, int]]:
        """Names and bytes in the order of submission; of these names, or of all operations."""
        return [(o.name, o.bytes) for o in self.operations if not names or o.name in names]

    def launched_before(self, moment: float) -> int:
        return sum(operation.begin < moment for operation in self.operations)

    def waited_until(self, moment: float) -> float:
        """Milliseconds that were spent in communication calls before this moment."""
        return sum(max(0.0, min(end, moment) - begin) for begin, end in self.waits)


def clock() -> Any:
    """Milliseconds of the clock that the core uses, out of reach of code that patches ``time``."""
    now = time.monotonic_ns
    return lambda: now() * 1e-6
