"""Processors: what computation and communication cost them, and how threads share their cores.

Each rank has a program thread, which computes, and one thread at a time that drives its operations:
the progress thread, or the program's own while it waits. The threads of a host that want a core
share its cores evenly, as equal threads do under Linux. A driving thread without work sleeps, and
takes ``wake`` to run again. While computation has all cores, it waits until one of them is free, or
until Linux takes one away for it, ``busy_wake`` after it was woken. To sleep beside computation
takes ``woken`` of a core each time, but no more than all of one; what comes meanwhile need not
wait for that.

What they cost is in a file of ``dpcore calibrate``, of this machine or of the one whose job is
predicted:

    calibration = calibrated()                    this user's file, or one by its path
    Network(8, links, "auto", calibration.processors)
    calibration.network                           the link between its hosts, if that was measured
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from dpcore.base.link import Speed
from dpcore.comm.communicators.costs import Costs, Way, cache_file, measured
from dpcore.errors import Unsupported
from dpcore.tools.simulate.choice import DEFAULT_COSTS
from dpcore.tools.simulate.links import FIRST_WINDOW, Links

Act = Callable[[float], None]
At = Callable[[float, Act], None]


@dataclass(frozen=True)
class Processors:
    """What this job's processors take, in seconds.

    ``cores``: of a host, 0 for one per thread. ``ranks``: that share them; 0 for the ranks of a
    host of the links, but an emulated link lets ranks of one machine behave as hosts.
    ``operation``, ``memory_operation``: of a rank, for each operation, over a network and in memory
    that ranks share. ``message``, ``tcp_message``: to send or to take one. ``copied_byte``,
    ``reduced_byte``: to copy a byte, to add one to a sum, while all ranks do so. ``fused_byte``: to
    add a peer's byte and to write the sum to the peer, in shared memory. ``tcp_byte``: to give the
    kernel a byte, or to take it. ``wake``: until a thread that slept runs; ``busy_wake``: on cores
    that all compute; ``woken``: what sleeping and waking up take of a core then, beside the
    thread's work and with what the program loses, and what it takes to wake up for each frame where
    priorities keep the kernel's queue short.
    ``update_call``: a call of the optimizer, beside its share of the parameters. ``costs``: by
    which ``auto`` chooses.
    """

    cores: float = 0
    ranks: int = 0
    operation: float = 0.0
    memory_operation: float = 0.0
    message: float = 0.0
    tcp_message: float = 0.0
    copied_byte: float = 0.0
    reduced_byte: float = 0.0
    fused_byte: float = 0.0
    tcp_byte: float = 0.0
    wake: float = 0.0
    busy_wake: float = 0.0
    woken: float = 0.0
    update_call: float = 0.0
    costs: Costs = DEFAULT_COSTS

    @classmethod
    def free(cls) -> Processors:
        """Processors that take no time and are always there: the network alone."""
        return cls()

    @classmethod
    def typical(cls) -> Processors:
        """What ``dpcore calibrate`` has measured on a virtual machine with two cores of an Intel
        Xeon, for machines that were not measured; with a core for each thread."""
        return cls(
            operation=21e-6, memory_operation=1.5e-6, message=1.6e-6, tcp_message=6e-6,
            copied_byte=0.73e-10, reduced_byte=0.7e-10, fused_byte=1.0e-10, tcp_byte=2e-10,
            wake=30e-6,
        )  # fmt: skip

    @property
    def are_shared(self) -> bool:
        """Whether fewer cores than ranks are on a machine."""
        return 0 < self.cores < self.ranks

    @property
    def is_free(self) -> bool:
        """Whether communication takes them no time."""
        return self == Processors(self.cores, self.ranks, costs=self.costs)


class _Host:
    """Threads that share cores. Each of them runs at the same rate, so one clock of work done,
    which goes at that rate, says when each is through."""

    def __init__(self, cores: float, at: At) -> None:
        self._cores = cores
        self._at = at
        self._running: list[tuple[float, int, Act]] = []  # a heap, by the clock at the end
        self._order = count()
        self._clock = 0.0
        self._since = 0.0  # the moment of the clock
        self._changes = 0
        self._computing = 0  # programs
        self._awake: deque[list[Act]] = deque()  # drivers that have no core; empty: it has one

    def run(self, seconds: float, now: float, act: Act) -> None:
        """A thread wants a core for so long."""
        self._go_on(now)
        heapq.heappush(self._running, (self._clock + seconds, next(self._order), act))
        self._plan(now)

    def compute(self, seconds: float, now: float, act: Act) -> None:
        """A program wants a core for so long, and may compute on in ``act``."""
        self._computing += 1

        def is_through(moment: float) -> None:
            self._computing -= 1
            act(moment)
            while self._awake and not self.is_full():
                self._give_core(self._awake.popleft(), moment)

        self.run(seconds, now, is_through)

    def get_core(self, patience: float, now: float, act: Act) -> None:
        """A driver is awake and wants one that no program computes on. After its ``patience`` it
        takes one away."""
        if patience <= 0 or not self.is_full():
            act(now)
            return
        waiting = [act]
        self._awake.append(waiting)
        self._at(now + patience, partial(self._give_core, waiting))

    def is_full(self) -> bool:
        """Whether programs compute on all cores."""
        return 0 < self._cores <= self._computing

    @staticmethod
    def _give_core(waiting: list[Act], now: float) -> None:
        if waiting:
            waiting.pop()(now)

    def _rate(self) -> float:
        return min(1.0, self._cores / len(self._running)) if self._cores else 1.0

    def _go_on(self, now: float) -> None:
        if self._running:
            self._clock += (now - self._since) * self._rate()
        self._since = now

    def _plan(self, now: float) -> None:
        self._changes += 1
        if self._running:
            left = max(0.0, self._running[0][0] - self._clock)
            self._at(now + left / self._rate(), partial(self._end, self._changes))

    def _end(self, change: int, now: float) -> None:
        if change != self._changes:
            return  # threads have come since, or are through
        self._go_on(now)
        clock, _, act = heapq.heappop(self._running)
        self._clock = max(self._clock, clock)
        self._plan(now)
        act(now)


@dataclass
class _Driver:
    """The thread that drives a rank's operations, with what it has to do: a heap, by urgency."""

    todo: list[tuple[int, int, float, Act]]
    is_awake: bool = False
    sleeps_again: float = 0.0  # when it may at the earliest: what that takes has passed


class Threads:
    """The threads of all ranks. ``ranks_per_host``: that share the cores."""

    def __init__(self, processors: Processors, world: int, ranks_per_host: int, at: At) -> None:
        self.world = world
        self._processors = processors
        self._is_free = processors.is_free
        self._at = at
        self._order = count()
        together = processors.ranks or ranks_per_host
        hosts = [_Host(processors.cores, at) for _ in range((world - 1) // together + 1)]
        self._host_of = [hosts[rank // together] for rank in range(world)]
        self._drivers = [_Driver([]) for _ in range(world)]

    def compute(self, rank: int, seconds: float, busy: float, now: float, act: Act) -> None:
        """The program computes, and needs a core for a part of the time."""
        if not self._processors.cores or not busy or not seconds:
            self._at(now + seconds, act)
            return
        rest = seconds * (1 - busy)
        then = act if not rest else lambda moment: self._at(moment + rest, act)
        self._host_of[rank].compute(seconds * busy, now, then)

    def work(
        self, rank: int, seconds: float, priority: int, now: float, act: Act, is_awake: bool = False
    ) -> None:
        """The thread that drives a rank's operations works; the most urgent first. ``is_awake``: it
        is the program's, which calls, or waits and polls."""
        if self._is_free:
            act(now)
            return
        driver = self._drivers[rank]
        heapq.heappush(driver.todo, (-priority, next(self._order), seconds, act))
        if not driver.is_awake:
            driver.is_awake = True
            run = partial(self._next, rank)
            if is_awake:
                self._at(now, run)
            else:
                costs = self._processors
                patience = costs.busy_wake - costs.wake
                get = partial(self._host_of[rank].get_core, patience, act=run)
                self._at(now + costs.wake, get)

    def _next(self, rank: int, now: float) -> None:
        driver, host = self._drivers[rank], self._host_of[rank]
        if not driver.todo:
            driver.is_awake = False
            price = self._processors.woken
            if price and host.is_full() and now >= driver.sleeps_again:
                driver.sleeps_again = now + price
                host.run(price, now, lambda _: None)
            return
        _, _, seconds, act = heapq.heappop(driver.todo)

        def is_through(moment: float) -> None:
            act(moment)
            self._at(moment, partial(self._next, rank))

        host.run(seconds, now, is_through)


# ---- a file of dpcore calibrate ------------------------------------------------------------------

_NEEDED = (
    "memory", "added_byte", "operation", "memory_operation", "message", "tcp_message", "wake",
    "busy_wake", "woken", "copied_byte", "reduced_byte", "fused_byte", "tcp_byte", "update_call",
)  # fmt: skip


@dataclass(frozen=True)
class Calibration:
    """``network``: None where no launcher has started ranks on several hosts to measure it."""

    processors: Processors
    network: Links | None
    source: str


def calibrated(path: Path | None = None) -> Calibration:
    """From a file of ``dpcore calibrate``; without a path, the one in this user's cache."""
    found, cores = measured(path)
    where = str(path or cache_file())
    if missing := [name for name in _NEEDED if name not in found]:
        raise Unsupported(
            f"{where} has no {', '.join(missing)}: measure this machine with dpcore calibrate, "
            "without a launcher"
        )
    memory = Way(*found["memory"])
    way = Way(*found["network"]) if "network" in found else DEFAULT_COSTS.network
    (added,) = found["added_byte"]
    costs: dict[str, Any] = {name: found[name][0] for name in _NEEDED[2:]}
    processors = Processors(cores=cores, costs=Costs(memory, way, added, where), **costs)
    if "network" not in found:
        return Calibration(processors, None, where)
    rate = 1 / way.byte if way.byte else 0.0
    # Measured were bytes of payload, so there is no header left to count.
    ramps = found.get("after_pause", [0.0])[0] > way.step
    window = FIRST_WINDOW if ramps else 0
    network = Links(Speed(rate, way.step), first_window=window, is_tcp=True)
    return Calibration(processors, network, where)
