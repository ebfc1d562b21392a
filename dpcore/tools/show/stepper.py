"""A schedule by itself, move by move: what notebooks show of it."""

from __future__ import annotations

from typing import Any

from dpcore.base.markup import frame
from dpcore.reference.moves import Move, Schedule
from dpcore.tools.show.page import filled, json_text, part
from dpcore.tools.show.schedules import can_be_followed, steps_of

_ROW = 48  # pixels of a chunk in the drawing
_AROUND = 190


def stepper_of(schedule: Any) -> str | None:
    """HTML for a schedule of the core or of ``dpcore.reference``. None where it is too large to be
    drawn, or wrong."""
    names = ("algorithm", "collective", "world", "chunks", "root", "ordered")
    plan = Schedule(
        **{name: getattr(schedule, name) for name in names},
        moves=tuple(Move(*move) for move in schedule.moves),
    )
    if not can_be_followed(plan):
        return None
    entry = {"algorithms": {plan.algorithm: steps_of(plan)}, "first": plan.algorithm}
    page = filled(
        part("stepper.html"),
        {
            "style": part("style.css"),
            "stepper": part("moves.html"),
            "data": json_text({str(plan.world): {plan.collective: entry}}),
            "script": part("6_stepper.js"),
        },
    )
    return frame(page, _AROUND + _ROW * plan.chunks)
