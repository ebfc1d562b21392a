"""The order of measurement: within one cell, round by round, every contender in turn.

A slow minute of the machine then falls on all contenders alike, and ratios stay meaningful where
absolute figures do not. While one group measures, the ranks of all others block in a socket read.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from dpcore.tools.compare.collectives import loop
from dpcore.tools.compare.collectives.cells import Cell
from dpcore.tools.compare.collectives.contenders import Contender, NotInstalledError
from dpcore.tools.compare.collectives.group import GroupError, RankGroup
from dpcore.tools.compare.collectives.loop import Measurement, Pace
from dpcore.tools.compare.collectives.wires import LOOPBACK, Wire

MOST_STARTS = 3  # of one group: a library that breaks in one cell may still do the others
Step = Callable[[RankGroup, Measurement], None]


class Field:
    """All groups of one world size, started once and used for every cell."""

    def __init__(
        self,
        contenders: Sequence[Contender],
        world: int,
        folder: Path,
        huge_pages: bool = False,
        wire: Wire = LOOPBACK,
    ) -> None:
        self.contenders, self.world = tuple(contenders), world
        self.absent: dict[str, str] = {}  # group -> why it takes no part
        self.groups: dict[str, RankGroup] = {}
        self._start_arguments = (world, folder, huge_pages, wire)
        self._starts: dict[str, int] = {}
        self._busy: dict[str, float] = {}  # processor seconds within own turns
        self._at_start: dict[str, float] = {}
        self._own_turns: dict[str, float] = {}
        self._began = time.monotonic()

    def __enter__(self) -> Field:
        try:
            self._start(dict.fromkeys(c.group for c in self.contenders))
        except BaseException:
            self.stop()
            raise
        # A contender that did not start is reported once, not again in every cell.
        self.contenders = tuple(c for c in self.contenders if c.group not in self.absent)
        self._began = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self, names: dict[str, None]) -> None:
        """Starts together, then waits for each: imports take most of the time."""
        for name in names:
            self._starts[name] = self._starts.get(name, 0) + 1
            try:
                self.groups[name] = RankGroup(name, *self._start_arguments)
            except (NotInstalledError, OSError) as reason:
                self.absent[name] = str(reason)
        for name in names:
            if name in self.groups and not self.groups[name].alive:
                try:
                    self.groups[name].wait_ready()
                except GroupError as reason:
                    self.absent[name] = str(reason).removeprefix(f"{name}: ")
                    del self.groups[name]
                else:
                    self._at_start[name] = self.groups[name].cpu_seconds()
                    self._busy[name] = self._own_turns[name] = 0.0

    @contextmanager
    def _turn_of(self, name: str) -> Iterator[RankGroup]:
        """Charges what happens within to this group's own turns."""
        group = self.groups[name]
        began, cpu = time.monotonic(), group.cpu_seconds()
        yield group
        if group.alive:
            self._busy[name] += group.cpu_seconds() - cpu
            self._own_turns[name] += time.monotonic() - began

    def stop(self) -> None:
        groups, self.groups = list(self.groups.values()), {}
        try:
            for group in groups:
                group.stop()
        finally:
            for group in groups:
                group.kill()

    def versions(self) -> dict[str, dict[str, str]]:
        return {name: group.versions for name, group in self.groups.items()}

    def awake_share(self) -> dict[str, float]:
        """Cores that each group used while it was not its turn. Should be 0: idle means asleep."""
        wall = time.monotonic() - self._began
        shares = {}
        for name, group in self.groups.items():
            if group.alive and (others := wall - self._own_turns[name]) > 1.0:
                outside = group.cpu_seconds() - self._at_start[name] - self._busy[name]
                shares[name] = max(0.0, outside / others)
        return shares

    def measure(
        self, cell: Cell, pace: Pace, on_turn: Callable[[], None] = lambda: None
    ) -> list[Measurement]:
        """One cell for all contenders. A contender that fails says so; the others go on."""
        results = [Measurement(cell, contender) for contender in self.contenders]
        for result in results:
            result.missing = self.absent.get(result.contender.group, "")
        self._each(results, loop.prepare, on_turn)
        self._each(results, lambda ranks, one: loop.calibrate(ranks, one, pace), on_turn)
        order = list(results)
        for number in range(pace.rounds):
            # Another order in every round: none always runs after the one that empties the cache.
            random.Random(number).shuffle(order)
            self._each(order, lambda ranks, one: loop.one_round(ranks, one, pace), on_turn)
        self._release(results)
        self._restart_fallen()
        return results

    def _each(
        self,
        results: Sequence[Measurement],
        step: Step,
        on_turn: Callable[[], None],
    ) -> None:
        for result in results:
            if not result.missing:
                self._turn(result, step)
            on_turn()

    def _turn(self, result: Measurement, step: Step) -> None:
        name = result.contender.group
        if not self.groups[name].alive:
            result.missing = "its group ended in this cell"
            return
        try:
            with self._turn_of(name) as group:
                step(group, result)
        except GroupError as reason:
            result.missing = str(reason)
            result.rounds.clear()

    def _release(self, results: Sequence[Measurement]) -> None:
        for name, group in self.groups.items():
            if group.alive:
                mine = [r for r in results if r.contender.group == name]
                try:
                    with self._turn_of(name):
                        facts = loop.release(group)
                except GroupError as reason:
                    for result in mine:
                        result.missing = result.missing or str(reason)
                else:
                    for result in mine:
                        result.facts = facts

    def _restart_fallen(self) -> None:
        fallen = {name: None for name, group in self.groups.items() if not group.alive}
        for name in list(fallen):
            del self.groups[name]
            if self._starts[name] >= MOST_STARTS:
                self.absent[name] = f"given up after {MOST_STARTS} failures"
                del fallen[name]
        self._start(fallen)
