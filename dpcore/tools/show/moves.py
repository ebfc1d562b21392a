"""``dpcore show ring``: steps through an algorithm, without a trace."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from dpcore import reference
from dpcore.base.own_algorithm import OwnAlgorithm
from dpcore.base.user_code import is_own, names_code, place_of, without_folders
from dpcore.errors import Error, Unsupported
from dpcore.reference import plans
from dpcore.tools.show.schedules import LARGEST_WORLD, SHOWN_FIRST, can_be_followed, steps_of

WORLD = 4


def algorithms() -> list[str]:
    """The names of all algorithms, those of all-reduce first."""
    return list(dict.fromkeys(name for known in reference.ALGORITHMS.values() for name in known))


def is_meant(arguments: list[Path]) -> bool:
    """Whether ``dpcore show`` is asked for an algorithm: by its name, or as file.py:function,
    where no file has it, or for a file with a plan."""
    if len(arguments) != 1:
        return False
    if os.path.exists(arguments[0]):
        return arguments[0].is_file() and plans.is_plan(arguments[0])
    name = str(arguments[0])
    return name in algorithms() or (names_code(name) and place_of(name).endswith(".py"))


def asked(
    name: str, collective: str | None, world: int | None, drawn: bool = True
) -> reference.Schedule:
    """The moves that the options ask for."""
    ranks = _drawable if drawn else _any
    if is_own(name):
        own = OwnAlgorithm(name)
        if own.world is not None and world is None:  # proved, and perhaps too large to be drawn
            return own.schedule(own.world, collective)
        plan = own.schedule(ranks(world), collective)
        if drawn and not can_be_followed(plan):
            raise Unsupported(
                f"{name} has {plan.chunks} chunks on {plan.world} ranks, more than one can follow"
            )
        return plan
    having = [known for known in reference.ALGORITHMS if name in reference.algorithms_of(known)]
    collective = having[0] if collective is None else collective
    if collective not in having:
        raise Unsupported(f"{name} is not an algorithm of {collective}, but of {', '.join(having)}")
    return reference.make_schedule(name, collective, ranks(world))


def _any(world: int | None) -> int:
    return WORLD if world is None else world


def _drawable(world: int | None) -> int:
    world = _any(world)
    if not 2 <= world <= LARGEST_WORLD:
        raise Unsupported(
            f"{world} ranks can't be drawn: choose 2 to {LARGEST_WORLD}, since more have more "
            "arrows than one can follow"
        )
    return world


def content(plan: reference.Schedule, own: str = "") -> dict[str, Any]:
    """What the page gets: all algorithms for all numbers of ranks, and this one to begin with.
    ``own``: the user's, as file.py:function or plan.xml, of which ``plan`` is for one number."""
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
            if own and collective == plan.collective and (moves := _own_moves(own, world, plan)):
                first = without_folders(own)
                drawn[first] = moves
            of_world[collective] = {"algorithms": drawn, "first": first}
    return {"runs": [], "schedules": schedules, "world": str(plan.world)}


def _own_moves(name: str, world: int, plan: reference.Schedule) -> dict[str, Any] | None:
    """Nothing where it has none for so many ranks, such as a number that is no power of two."""
    if world == plan.world:
        return steps_of(plan)
    try:
        other = OwnAlgorithm(name).schedule(world, plan.collective)
    except Error:
        return None
    return steps_of(other) if can_be_followed(other) else None
