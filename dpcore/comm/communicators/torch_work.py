"""The handle of an operation that a process group of torch runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

from dpcore.comm.communicators.checks import check_wait
from dpcore.comm.communicators.work import LONGEST_SECONDS


class TorchWork:
    """An operation of the group in flight, and what is to be done when it is complete."""

    def __init__(self, work: Any, result: list[Any], finish: Callable[[], Any] | None) -> None:
        self._work, self._result, self._finish = work, result, finish
        self._finishing = threading.Lock()

    def wait(self, timeout: float | None = None) -> None:
        """Returns when the result is there; raises torch's error otherwise."""
        check_wait(timeout)
        if self._work is not None:
            longest = [] if not timeout else [timedelta(seconds=min(timeout, LONGEST_SECONDS))]
            self._work.wait(*longest)
        self._complete()

    def _complete(self) -> None:
        with self._finishing, torch.no_grad():
            if self._finish is not None:
                try:
                    self._finish()
                finally:
                    self._finish = None  # not before: is_completed() asks for it

    def is_completed(self) -> bool:
        """Whether it has ended. Its result is there then, unless ``wait`` raises why not."""
        if self._work is not None and not self._work.is_completed():
            return False
        if self._finish is not None:
            with contextlib.suppress(Exception):
                self.wait()
        return True

    @property
    def source(self) -> int | None:
        """The rank that a message came from."""
        return None if self._work is None else int(self._work._source_rank())

    def get_future(self) -> torch.futures.Future[list[Any]]:
        """A torch future whose value is the list of result tensors."""

        def finished(future: Any) -> list[Any]:
            future.wait()  # raises its error; the work itself may not be complete before us
            self._complete()
            return self._result

        chained: torch.futures.Future[list[Any]] = self._work.get_future().then(finished)
        return chained
