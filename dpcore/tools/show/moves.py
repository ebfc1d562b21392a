"""``dpcore show ring``: steps through an algorithm, without a trace."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from dpcore import reference
from dpcore.errors import Unsupported
from dpcore.tools.show.schedules import LARGEST_WORLD, SHOWN_FIRST, steps_of

WORLD = 4


def algorithms() -> list[str]:
    """The names of all algorithms, those of all-reduce first."""
    return list(dict.fromkeys(name for known in reference.ALGORITHMS.values() for name in known))


def is_meant(arguments: list[Path]) -> bool:
    """Whether ``dpcore show`` is asked for an algorithm: by its name, where no file has it."""
    return (
        len(arguments) == 1
        and str(arguments[0]) in algorithms()
        and not os.path.exists(arguments[0])
    )


def asked(name: str, collective: str | None, world: int | None) -> reference.Schedule:
    """The moves that the options ask for."""
    having = [known for known in reference.ALGORITHMS if name in reference.algorithms_of(known)]
    world = WORLD if world is None else world
    collective = having[0] if collective is None else collective
    if collective not in having:
        raise Unsupported(f"{name} is not an algorithm of {collective}, but of {', '.join(having)}")
    if not 2 <= world <= LARGEST_WORLD:
        raise Unsupported(
            f"{world} ranks can't be drawn: choose 2 to {LARGEST_WORLD}, since more have more "
            "arrows than one can follow"
        )
    return reference.make_schedule(name, collective, world)


def content(plan: reference.Schedule) -> dict[str, Any]:
    """What the page gets: all algorithms for all numbers of ranks, and this one to begin with."""
    others = [name for name in reference.ALGORITHMS if name != plan.collective]
    schedules: dict[str, dict[str, Any]] = {}
    for world in range(2, LARGEST_WORLD + 1):
        of_world = schedules[str(world)] = {}
        for collective in (plan.collective, *others):
            known = reference.algorithms_of(collective)
            usual = SHOWN_FIRST.get(collective, known[0])
            drawn = {
                name: steps_of(reference.make_schedule(name, collective, world)) for name in known
            }
            first = plan.algorithm if plan.algorithm in known else usual
            of_world[collective] = {"algorithms": drawn, "first": first}
    return {"runs": [], "schedules": schedules, "world": str(plan.world)}
