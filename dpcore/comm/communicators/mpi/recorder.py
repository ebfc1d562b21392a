"""What ``dpcore.trace`` records of operations over MPI."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpcore import _C
    from dpcore.comm.communicators.mpi.operation import MpiWork

_Event = tuple[str, str, int, int, int, int, int, int, str, str, int, int, int]  # as of the core


class Recorder:
    """Operations and waits, from Python; what a model's reducer does goes to the recorder of a
    communicator of the core that has one rank."""

    def __init__(self, has_failed: Callable[[], bool]) -> None:
        from dpcore import _C

        self._has_failed = has_failed
        self.core: _C.Communicator = _C.start(
            "alone",
            0,
            1,
            timeout=1.0,
            threads=False,
            tcp=None,
            link=None,
            algorithm="auto",
            deterministic=False,
            costs=_C.default_costs(),
        )
        self._events: deque[_Event] = deque()
        self._count = 0
        self.records = False

    @property
    def failed(self) -> bool:
        return self._has_failed()

    family_failed = failed  # all groups of an engine end with the first that fails

    def start_trace(self, capacity: int) -> None:
        self._events, self._count = deque(maxlen=capacity), 0
        self.core.start_trace(capacity)
        self.records = True

    def stop_trace(self) -> tuple[list[_Event], int, dict[str, Any]]:
        self.records = False
        found, dropped, schedules = self.core.stop_trace()
        return [*found, *self._events], dropped + self._count - len(self._events), schedules

    def add(self, work: MpiWork, kind: str, began_ns: int) -> None:
        """``kind``: "operation", of the whole of it, or "exposed", of a wait for it."""
        if not self.records:
            return
        what = work.what
        self._count += 1
        self._events.append(
            (
                what.name,
                kind,
                what.peer,
                threading.get_native_id(),
                what.number,
                what.nbytes,
                began_ns,
                time.monotonic_ns(),
                "mpi" if kind == "operation" else "",
                "",
                what.root,
                work.group.world_size,
                0,
            )
        )
