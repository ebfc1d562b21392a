"""Operations among ranks that share memory: the twin of ``operations/path_mapped.cpp``.

No message travels. In an all-reduce each rank adds its slice of all inputs and writes it to all
outputs; in a small one, or by ``one_shot``, it adds up everything for itself and waits for no rank
at the end. In the other collectives it reads, and adds or copies, what it needs. All of that is
work of processors, in segments between which a more urgent operation goes first.

Bytes are taken to come from outside the caches, as those of a step's buckets do: one after the
other is written and sent. A loop over the same buffer of less than 1 MiB, which stays in the
caches, takes a third of that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from dpcore.tools.simulate.processors import Processors, Threads

SEGMENT_BYTES = 256 << 10
SMALL_BYTES = 16384
FUSED = ("auto", "one_shot", "two_shot", "direct")  # any other algorithm sends messages in memory

Act = Callable[[float], None]


class InMemory:
    """One operation. ``finish`` is called when a rank is through, with the rank and the moment.
    ``polls``: threads that wait drive it, and do not sleep."""

    def __init__(
        self,
        collective: str,
        nbytes: int,
        priority: int,
        algorithm: str,
        world: int,
        processors: Processors,
        threads: Threads,
        finish: Callable[[int, float], None],
        polls: bool = False,
    ) -> None:
        self._priority = priority
        self._threads = threads
        self._finish = finish
        self._polls = polls
        self._waits = not (nbytes <= SMALL_BYTES or algorithm == "one_shot")
        seconds = seconds_of_rank(collective, nbytes, world, processors, self._waits)
        segments = max(1, math.ceil(nbytes / (world if self._waits else 1) / SEGMENT_BYTES))
        self._parts = [seconds / segments] * segments
        self._left = world

    def begin(self, rank: int, now: float) -> None:
        self._go_on(rank, 0, now)

    def _go_on(self, rank: int, done: int, now: float) -> None:
        if done < len(self._parts):
            then = partial(self._go_on, rank, done + 1)
            self._threads.work(rank, self._parts[done], self._priority, now, then, self._polls)
            return
        self._left -= 1
        if not self._waits:
            self._finish(rank, now)
        elif self._left == 0:
            for each in range(self._threads.world):
                self._finish(each, now)


def seconds_of_rank(
    collective: str, nbytes: int, world: int, processors: Processors, is_shared: bool = True
) -> float:
    """What one of so many ranks adds and copies. ``is_shared``: each does its part.

    >>> seconds_of_rank("all_reduce", 1_000_000, 2, Processors(fused_byte=3e-9))
    0.0015
    """
    parts = world if is_shared or collective != "all_reduce" else 1
    of_peers = (world - 1) / parts * nbytes
    if collective == "all_reduce":
        return of_peers * processors.fused_byte
    is_sum = collective == "reduce_scatter"
    return of_peers * (processors.reduced_byte if is_sum else processors.copied_byte)
