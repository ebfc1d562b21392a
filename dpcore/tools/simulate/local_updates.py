"""Ranks that train by themselves and agree every few steps: ``dp.LocalSGD`` and ``dp.DiLoCo``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dpcore.errors import Unsupported
from dpcore.tools.simulate.gradients import Gradients
from dpcore.tools.simulate.network import Network, NetworkOperation
from dpcore.tools.simulate.ranks import StepIsOver
from dpcore.tools.simulate.stragglers import Pace
from dpcore.tools.simulate.turns import Flight, Turns


@dataclass(frozen=True)
class LocalUpdates:
    """``sync_every``, ``fragments``, ``delay`` and ``bits`` as of ``dp.DiLoCo``, where ``delay`` is
    ``fragment_sync_delay``; ``dp.LocalSGD`` has the first only. ``outer``: seconds of the outer
    optimizer for all parameters. Fragments are taken to be of one size."""

    sync_every: int = 16
    fragments: int = 1
    delay: int = 0
    bits: int = 32
    outer: float = 0.0

    def __post_init__(self) -> None:
        between = self.sync_every // max(1, self.fragments)
        if not 1 <= self.fragments <= self.sync_every or not 0 <= self.delay < between:
            raise Unsupported(
                f"{self.words}: each of the fragments is sent after a step of its own, and is "
                "there before the next one is sent, so sync_every is at least fragments * "
                f"(delay + 1), here {self.fragments * (self.delay + 1)}"
            )
        if self.bits not in (8, 32):
            raise Unsupported(f"{self.words}: choose 32 or 8 bits")

    @staticmethod
    def of(work: Gradients, sync_every: int | None = None) -> LocalUpdates:
        """Those that were recorded, or others with as many fragments as those; as many steps in an
        interval as asked for."""
        options = dict(work.updates or {})
        if sync_every is not None:
            options["sync_every"] = sync_every
        return LocalUpdates(**options)

    @property
    def words(self) -> str:
        """In an error."""
        return (
            f"local updates with sync_every={self.sync_every}, fragments={self.fragments}, "
            f"fragment_sync_delay={self.delay} and {self.bits} bits"
        )

    @property
    def name(self) -> str:
        """As ``--schedule`` takes it."""
        return f"local:{self.sync_every}"

    @property
    def due(self) -> dict[int, int]:
        """By the step of an interval after which it is sent: the fragment."""
        return {(i + 1) * self.sync_every // self.fragments: i for i in range(self.fragments)}

    def share(self, world: int) -> float:
        """Of the bytes of an all-reduce in every step, what travels."""
        return (1.0 if self.bits == 32 else world / 8) / self.sync_every

    def operation(self, nbytes: int, world: int) -> NetworkOperation:
        """For one of the fragments of ``nbytes``: an all-reduce, or a gather of blocks of int8."""
        nbytes //= self.fragments
        if self.bits == 32:
            return NetworkOperation(nbytes, [])
        return NetworkOperation(nbytes // 4 * world, [], 0, "all_gather")


def local_ranks(
    work: Gradients, network: Network, updates: LocalUpdates, pace: Pace
) -> Callable[[int, StepIsOver], LocalRank]:
    """Programs of two intervals, of which the second counts."""
    shared: dict[int, NetworkOperation] = {}

    def made(rank: int, step_is_over: StepIsOver) -> LocalRank:
        return LocalRank(rank, work, network, updates, shared, pace, step_is_over)

    return made


class LocalRank:
    """``shared``: by number, what all ranks send."""

    def __init__(
        self,
        rank: int,
        work: Gradients,
        network: Network,
        updates: LocalUpdates,
        shared: dict[int, NetworkOperation],
        pace: Pace,
        step_is_over: StepIsOver,
    ) -> None:
        self._work, self._updates, self._shared = work, updates, shared
        self._pace, self._step_is_over = pace, step_is_over
        self.turns = Turns(rank, network, self._program)

    def _program(self) -> None:
        turns, updates, rank = self.turns, self._updates, self.turns.rank
        work = self._work
        flight: tuple[int, Flight] | None = None  # and the step after which it was sent
        sent = 0
        for step in range(1, 2 * updates.sync_every + 1):
            pace = self._pace(rank, step - 1)
            turns.compute((work.forward[rank] + work.backward[rank]) * pace, work.busy[rank])
            turns.compute(work.update[rank] * pace)
            if flight is not None and step >= flight[0] + updates.delay:
                self._land(flight[1])
                flight = None
            if (step - 1) % updates.sync_every + 1 in updates.due:
                flight = step, self._send(sent)
                sent += 1
                if updates.delay == 0:
                    self._land(flight[1])
                    flight = None
            self._step_is_over(rank, turns)

    def _send(self, number: int) -> Flight:
        turns = self.turns
        if number not in self._shared:
            nbytes, world = sum(self._work.sizes), turns.network.world
            self._shared[number] = self._updates.operation(nbytes, world)
        flight = Flight(self._shared[number], turns.rank)
        turns.network.launch(flight.operation, turns.rank, turns.now)
        return flight

    def _land(self, flight: Flight) -> None:
        self.turns.where = "optimizer"
        self.turns.wait_for(flight, "mean of the parameters")
        self.turns.compute(self._updates.outer / self._updates.fragments)
