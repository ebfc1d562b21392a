"""A program's own algorithms as the compiled core runs them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dpcore.base.own_algorithm import OwnAlgorithm
from dpcore.reference import Schedule

if TYPE_CHECKING:
    from dpcore import _C


def compiled(algorithm: Any, world: int, collective: str | None = None) -> _C.Schedule:
    """Its moves for so many ranks, proved by the core. ``collective``: None stands for any."""
    from dpcore import _C

    def made_of(plan: Schedule) -> _C.Schedule:
        names = (plan.algorithm, plan.collective, plan.world, plan.chunks)
        return _C.Schedule(*names, list(plan.moves), root=plan.root, ordered=plan.ordered)

    own = OwnAlgorithm(algorithm)
    return made_of(
        own.schedule(world, collective, prove=lambda plan: _C.check_schedule(made_of(plan)))
    )
