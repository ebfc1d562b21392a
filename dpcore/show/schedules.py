"""What the stepper of the page draws: the moves of schedules, and who holds which value after each.

Every chunk is one number here: ``rank + 1 + 10 * chunk`` at the beginning, so that its last digit
tells whose it is and the others where it belongs, until they are added.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from dpcore import reference
from dpcore.reference.collectives import Execution, chunks_at_start
from dpcore.reference.schedules import REDUCING
from dpcore.show.reading import Run

_LARGEST_WORLD = 8  # larger ones would have more arrows than one can follow
_BY_MESSAGES = {"all_reduce": "two_shot", "broadcast": "two_shot", "reduce": "two_shot"}


def schedules_for(runs: Iterable[Run]) -> dict[str, Any]:
    """By world and collective: the algorithms, and the one that the runs took."""
    result: dict[str, Any] = {}
    for run in runs:
        world = min(max(2, run.world_size), _LARGEST_WORLD)
        seen = {event.name for rank in run.ranks for event in rank.operations}
        for collective in sorted((seen & set(reference.ALGORITHMS)) | {"all_reduce"}):
            entry = result.setdefault(str(world), {}).setdefault(collective, {"algorithms": {}})
            for name in reference.algorithms_of(collective):
                entry["algorithms"].setdefault(name, steps_of_schedule(name, collective, world))
            entry["taken"], entry["is_known"] = algorithm_taken(run, collective)
    return result


def algorithm_taken(run: Run, collective: str) -> tuple[str, bool]:
    """The algorithm behind the path that most operations took, and whether the path tells: "moves"
    are messages of any algorithm, by default of the one with the fewest bytes and steps."""
    paths = run.paths.get(collective, {})
    path = max(paths, key=lambda name: paths[name]) if paths else "moves"
    known = reference.algorithms_of(collective)
    named = next((part for part in path.split("/") if part in known), None)
    if named is not None:
        return named, True
    return _BY_MESSAGES.get(collective, known[0]), False


def steps_of_schedule(algorithm: str, collective: str, world: int) -> dict[str, Any]:
    """``states[i]``: what the ranks hold before step i, as rows ``[rank, chunk, value, ranks that
    contributed]``. ``moves[i]``: ``[source, destination, chunk, 1 if it is added]``."""
    plan = reference.make_schedule(algorithm, collective, world)
    inputs = [
        np.array([rank + 1 + 10 * chunk for chunk in chunks_at_start(plan, rank)], np.int64)
        for rank in range(world)
    ]
    execution = Execution(plan, inputs, "sum")
    states, moves = [_state(execution)], []
    for step in execution.steps():
        moves.append([[move.src, move.dst, move.chunk, int(move.reduce)] for move in step])
        states.append(_state(execution))
    return {
        "chunks": plan.chunks,
        "ordered": plan.ordered,
        "reduces": collective in REDUCING,
        "states": states,
        "moves": moves,
    }


def _state(execution: Execution) -> list[list[int]]:
    return [
        [rank, chunk, int(copy.value[0]), len(copy.contributors)]
        for (rank, chunk), copy in sorted(execution.holdings.items())
    ]
