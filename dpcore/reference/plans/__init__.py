"""Plans of others: MSCCLang's XML and mscclpp's JSON, proved and turned into a schedule.

>>> from dpcore.reference import plans
>>> plans.schedule_of_file("allreduce.xml").moves[0]                  # doctest: +SKIP
Move(step=0, src=0, dst=1, chunk=1, reduce=True)
"""

from __future__ import annotations

import re
from pathlib import Path

from dpcore.reference.moves import Schedule
from dpcore.reference.plans import msccl, mscclpp
from dpcore.reference.plans.blocks import BlockPlan, PlanError
from dpcore.reference.plans.proof import prove
from dpcore.reference.plans.versions import NotMoves, schedule_of

__all__ = ["BlockPlan", "NotMoves", "PlanError", "is_plan", "prove", "read", "schedule_of",
           "schedule_of_file"]  # fmt: skip

_READERS = {".xml": msccl.read, ".json": mscclpp.read}
_HEAD = 4096  # of a file; a trace may be long


def is_plan(path: Path) -> bool:
    """Whether a file is meant as a plan: any XML, and JSON that is about a collective."""
    if path.suffix != ".json":
        return path.suffix in _READERS
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            head = file.read(_HEAD)
    except OSError:
        return False
    return re.search(r'"collective"\s*:\s*"', head) is not None


def read(path: Path) -> BlockPlan:
    """The plan in a file, not yet proved. An error names the file and the place."""
    if path.suffix not in _READERS:
        raise PlanError(f"{path}: plans end with {' or '.join(_READERS)}")
    try:
        return _READERS[path.suffix](path)
    except OSError as problem:
        raise PlanError(f"{path}: {problem.strerror}") from None
    except PlanError as problem:
        raise PlanError(f"{path}, {problem}") from None


def schedule_of_file(path: Path) -> Schedule:
    """The proved moves of a plan. Raises PlanError, or NotMoves where it is right and has none."""
    plan = read(path)
    try:
        return schedule_of(plan, prove(plan))
    except PlanError as problem:
        raise type(problem)(f"{path}, {problem}") from None
