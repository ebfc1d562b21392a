"""A thread for each simulated rank, of which one runs at a time.

A schedule may wait in the middle of an event, and then only its stack knows how it goes on. So each
rank's program has a thread, which hands over to the network whenever it computes or waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from dpcore.tools.simulate.network import Network, NetworkOperation


class Note(NamedTuple):
    """What a trace of a run has as an event; seconds."""

    name: str
    kind: str
    begin: float
    end: float
    number: int = 0  # of the bucket, the gradient or the operation
    nbytes: int = 0


class Flight:
    """An operation as one rank sees it. ``then`` calls ``act`` when it is over here."""

    def __init__(self, operation: NetworkOperation, rank: int) -> None:
        self.operation = operation
        self.is_over = False
        self._then: list[Callable[[float], None]] = []
        operation.when_finished(rank, self._over)

    def then(self, act: Callable[[float], None]) -> None:
        self._then.append(act)

    def _over(self, now: float) -> None:
        self.is_over = True
        for act in self._then:
            act(now)


class _Ended(BaseException):
    """The simulation is over, though this rank is not."""


class Turns:
    """The program of a rank, on a thread of its own. ``now``: its clock. ``waits``: how long it has
    waited for what, with ``where`` in front."""

    def __init__(self, rank: int, network: Network, program: Callable[[], None]) -> None:
        self.rank = rank
        self.network = network
        self.now = 0.0
        self.where = ""  # in its program
        self.waits: dict[str, float] = {}
        self.waits_for = "nothing"
        self.exchanges = 0  # that it has taken part in
        self.notes: list[Note] | None = None  # of what it does, where that is asked for
        self.is_over = False
        self._program = program
        self._problem: BaseException | None = None
        self._turn, self._back = threading.Lock(), threading.Lock()
        self._turn.acquire()
        self._back.acquire()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    # -- on the network's thread

    def resume(self, now: float) -> None:
        """Lets the rank go on until it computes or waits."""
        self.now = now
        self._turn.release()
        self._back.acquire()
        if self._problem is not None:
            raise self._problem

    def end(self) -> None:
        """Ends a program that is not over."""
        if self._thread.is_alive():
            self._problem = _Ended()
            self._turn.release()
            self._thread.join()

    # -- on the rank's thread

    def compute(self, seconds: float, busy: float = 1.0) -> None:
        """``busy``: the share of the time in which it uses a core."""
        if seconds > 0:
            self.network.compute(self.rank, seconds, self.now, self.resume, busy)
            self._pause()

    def wait_for(self, flight: Flight, in_words: str) -> None:
        if flight.is_over:
            return
        begin = self.now
        self.waits_for = f"{self.where}: {in_words}"
        flight.then(self.resume)
        self._pause()
        self.note(in_words.partition(" ")[0], "exposed", begin)
        self.waits[self.waits_for] = self.waits.get(self.waits_for, 0.0) + self.now - begin

    def note(self, name: str, kind: str, begin: float, number: int = 0, nbytes: int = 0) -> None:
        """That this took until now."""
        if self.notes is not None:
            self.notes.append(Note(name, kind, begin, self.now, number, nbytes))

    def _pause(self) -> None:
        self._back.release()
        self._turn.acquire()
        if self._problem is not None:
            raise self._problem

    def _run(self) -> None:
        self._turn.acquire()
        try:
            if self._problem is None:
                self._program()
                self.is_over = True
        except _Ended:
            return
        except BaseException as problem:
            self._problem = problem
        self._back.release()
