"""What the stepper of the page draws: the moves of schedules, and who holds which value after each.

Every chunk is one number here: ``rank + 1 + 10 * chunk`` at the beginning, so that its last digit
tells whose it is and the others where it belongs, until they are added.

What an operation ran is drawn with its world and root: from the list of moves in the file where it
ran one, else from the schedule that its path is named after. Beside it there are the other
algorithms of the collective, to be compared with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dpcore import reference
from dpcore.recorder.file import Event
from dpcore.reference.collectives import Execution, ScheduleError, check, chunks_at_start
from dpcore.reference.moves import Move, Schedule
from dpcore.reference.schedules import REDUCING
from dpcore.tools.show.run import Run

LARGEST_WORLD = 8  # larger ones would have more arrows than one can follow
_LARGEST_STATE = 1024  # copies of chunks
SHOWN_FIRST = {"all_reduce": "two_shot", "broadcast": "two_shot", "reduce": "two_shot"}

Kind = tuple[str, str, str, int, int]
Drawing = tuple[str, str, str, int]  # world, collective, name: of the drawn one; world of what ran


def kind_of(event: Event) -> Kind:
    """What operations have in common that have run the same moves."""
    return event.name, event.path, event.schedule, event.root, event.world


class DrawnSchedules:
    """``content``, by world and collective: ``algorithms``, by name, and which of them is
    ``first`` to be shown. Those with ``ran`` are what operations ran."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._runs = runs
        self.content: dict[str, dict[str, Any]] = {}
        self._drawings: dict[tuple[int, Kind], Drawing | tuple[()]] = {}
        for run in runs:
            seen = Counter(kind_of(event) for rank in run.ranks for event in rank.operations)
            for kind, _ in seen.most_common():
                self._drawings[id(run), kind] = self._draw(run, kind)
        for run in runs:
            self._add_others(run, {name for r, (name, *_) in self._drawings if r == id(run)})

    def drawing_of(self, run: Run, event: Event) -> Drawing | tuple[()]:
        """Where the moves of an operation are; nothing where they are not known."""
        return self._drawings.get((id(run), kind_of(event)), ())

    @property
    def first_world(self) -> str:
        """The world that is shown first: the first run's."""
        return str(_drawn_world(self._runs[0]))

    def _draw(self, run: Run, kind: Kind) -> Drawing | tuple[()]:
        plan = _plan_of(run, kind)
        if plan is None:
            return ()
        entry = self._entry(plan.world, plan.collective)
        name = plan.algorithm + (f", root {plan.root}" if plan.root else "")
        drawn = {**steps_of(plan), "ran": True}
        others = (f"{name} {n}" for n in range(2, 1000))  # one's own may be called like another one
        while entry["algorithms"].setdefault(name, drawn) != drawn:
            name = next(others)
        entry.setdefault("first", name)
        return str(plan.world), plan.collective, name, kind[-1]

    def _add_others(self, run: Run, collectives: set[str]) -> None:
        world = _drawn_world(run)
        for collective in sorted((collectives & set(reference.ALGORITHMS)) | {"all_reduce"}):
            entry = self._entry(world, collective)
            known = reference.algorithms_of(collective)
            for name in known:
                if name not in entry["algorithms"]:
                    plan = reference.make_schedule(name, collective, world)
                    entry["algorithms"][name] = steps_of(plan)
            entry.setdefault("first", SHOWN_FIRST.get(collective, known[0]))

    def _entry(self, world: int, collective: str) -> dict[str, Any]:
        of_world = self.content.setdefault(str(world), {})
        entry: dict[str, Any] = of_world.setdefault(collective, {"algorithms": {}})
        return entry


def _drawn_world(run: Run) -> int:
    return min(max(2, run.world_size), LARGEST_WORLD)


def _plan_of(run: Run, kind: Kind) -> Schedule | None:
    collective, path, number, root, world = kind
    listed = _listed_plan(run.schedules.get(number))
    if listed is not None and (world <= LARGEST_WORLD or world != listed.world):
        return listed if can_be_followed(listed) else None
    algorithm = path.partition("/")[0]
    # Which moves the latter has is a matter of hosts.
    if algorithm not in reference.algorithms_of(collective) or algorithm == "hierarchical":
        return None
    if world < 2 or (listed is not None and listed != _plan(algorithm, collective, world, root)):
        return None  # it moved nothing, or was one's own and is only called like that
    return _plan(algorithm, collective, min(world, LARGEST_WORLD), root)


def _plan(algorithm: str, collective: str, world: int, root: int) -> Schedule:
    return reference.make_schedule(algorithm, collective, world, min(max(0, root), world - 1))


def _listed_plan(listed: Mapping[str, Any] | None) -> Schedule | None:
    if listed is None or "moves" not in listed:
        return None
    moves = tuple(Move._make((*where, bool(adds))) for *where, adds in listed["moves"])
    names = ("algorithm", "collective", "world", "chunks", "root", "ordered")
    return Schedule(**{name: listed[name] for name in names}, moves=moves)


def can_be_followed(plan: Schedule) -> bool:
    """Whether it is right and small enough to be drawn: a file, or a program, may say anything."""
    if plan.world > LARGEST_WORLD or plan.world * plan.chunks > _LARGEST_STATE:
        return False
    try:
        check(plan)
    except ScheduleError:
        return False
    return True


def steps_of(plan: Schedule) -> dict[str, Any]:
    """``states[i]``: what the ranks hold before step i, as rows ``[rank, chunk, value, ranks that
    contributed]``. ``moves[i]``: ``[source, destination, chunk, 1 if it is added]``."""
    inputs = [
        np.array([rank + 1 + 10 * chunk for chunk in chunks_at_start(plan, rank)], np.int64)
        for rank in range(plan.world)
    ]
    execution = Execution(plan, inputs, "sum")
    states, moves = [_state(execution)], []
    for step in execution.steps():
        moves.append([[move.src, move.dst, move.chunk, int(move.reduce)] for move in step])
        states.append(_state(execution))
    return {
        "chunks": plan.chunks,
        "reduces": plan.collective in REDUCING,
        "states": states,
        "moves": moves,
    }


def _state(execution: Execution) -> list[list[int]]:
    return [
        [rank, chunk, int(copy.value[0]), len(copy.contributors)]
        for (rank, chunk), copy in sorted(execution.holdings.items())
    ]
