"""Algorithms of a program's own: ``mine.py:swing``, a function of the number of ranks, a schedule.

    def swing(world):                   # moves (step, src, dst, chunk, reduce) of an all-reduce
        return [(0, rank, rank ^ 1, 0, True) for rank in range(world)]

The function may also return ``(chunks, moves)``, or a ``Schedule`` of ``dpcore`` or of
``dpcore.reference``, which says for itself what collective it is. What it returns is proved before
it is used. Nothing here needs the compiled core.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import lru_cache
from operator import index
from pathlib import Path
from typing import Any

from dpcore.base.user_code import is_own, loaded, names_code, naming_the_line
from dpcore.errors import Error, Unsupported
from dpcore.reference import Move, Schedule, ScheduleError, check, make_schedule
from dpcore.reference.moves import in_sending_order

__all__ = ["OwnAlgorithm", "is_own", "schedule_of"]

_USUAL = "algorithm"  # the name that a file without one is searched for
_INSTEAD = "pass a function of the number of ranks instead"
_FIELDS = ("algorithm", "collective", "world", "chunks", "root", "ordered")


def schedule_of(algorithm: Any, collective: str, world: int) -> Schedule:
    """The proved moves of an algorithm of dpcore's, by its name, or of one's own.

    >>> schedule_of("ring", "all_reduce", 2).chunks
    2
    >>> both = [(0, 0, 1, 0, True), (0, 1, 0, 0, True)]
    >>> schedule_of(lambda world: both, "all_reduce", 2).moves[0]
    Move(step=0, src=0, dst=1, chunk=0, reduce=True)
    """
    if is_own(algorithm):
        return OwnAlgorithm(algorithm).schedule(world, collective)
    return make_schedule(algorithm, collective, world)


class OwnAlgorithm:
    """``name``: as the program wrote it, or what the function or schedule is called."""

    def __init__(self, algorithm: Any) -> None:
        code = _named(algorithm) if isinstance(algorithm, str) else algorithm
        self._made = _is_schedule(code)
        self._is_plan = isinstance(algorithm, str) and not names_code(algorithm)
        if not self._made and not callable(code):
            wanted = "a name, FILE:NAME, a function of the number of ranks or a dpcore.Schedule"
            if not isinstance(algorithm, str):
                raise TypeError(f"algorithm: expected {wanted}, not {algorithm!r}")
            kind = type(code).__name__
            raise Unsupported(f"algorithm {algorithm}: expected {wanted}, not a {kind}")
        self._code: Any = code
        called = code.algorithm if self._made else getattr(code, "__name__", type(code).__name__)
        self.name: str = algorithm if isinstance(algorithm, str) else called
        self.world: int | None = code.world if self._made else None  # None: any

    def schedule(
        self,
        world: int,
        collective: str | None = "all_reduce",
        prove: Callable[[Schedule], None] = check,
    ) -> Schedule:
        """Its moves for so many ranks, proved. ``collective``: None stands for any. ``prove``
        raises what is wrong with a schedule."""
        about = f"algorithm {self.name} for {world} ranks"
        found = self._code
        if not self._made:
            with naming_the_line(about):
                found = self._code(world, *[0] * _takes_root(self._code))
        made = _from_schedule(found) if _is_schedule(found) else self._from_moves(found, world)
        if made.world != world:
            raise Unsupported(
                f"{about}: it is a schedule for {made.world} ranks"
                + (f"; {_INSTEAD}" if self._made and not self._is_plan else "")
            )
        if collective not in (None, made.collective):
            raise Unsupported(f"{about}: it is for {made.collective}, not for {collective}")
        try:
            prove(made)
        except (ValueError, Error) as problem:
            said = str(problem).rpartition(" is wrong: ")[2]  # the core names it, too
            raise Unsupported(f"{about} is wrong: {said}") from None
        return made

    def _from_moves(self, found: Any, world: int) -> Schedule:
        """Of a list, in any order, or of one behind its number of chunks."""
        about = f"algorithm {self.name} for {world} ranks"
        listed = found
        chunks = None
        if isinstance(found, tuple) and len(found) == 2 and not isinstance(found[0], Iterable):
            chunks, listed = found
        if isinstance(listed, str) or not isinstance(listed, Iterable):
            raise Unsupported(
                f"{about}: it returned a {type(found).__name__}; return a dpcore.Schedule, a list "
                "of moves (step, src, dst, chunk, reduce), or (chunks, moves)"
            )
        moves = [_move(one, about) for one in listed]
        if chunks is None:
            chunks = 1 + max((move.chunk for move in moves), default=0)
        ordered = world <= 2  # two contributions can only be added at once
        return Schedule(
            self.name, "all_reduce", world, chunks, 0, ordered, in_sending_order(moves, world)
        )


def _named(algorithm: str) -> Any:
    """The code or the plan that a text names."""
    if names_code(algorithm):
        return loaded(algorithm, _USUAL)
    path = Path(algorithm)
    if not path.is_file():
        raise Unsupported(f"there is no file {path}")
    return _schedule_in(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=32)
def _schedule_in(path: Path, _: int) -> Schedule:
    """Of a plan; a changed file is read again."""
    from dpcore.reference import plans

    try:
        return plans.schedule_of_file(path)
    except ScheduleError as problem:
        raise Unsupported(str(problem)) from None


def _is_schedule(found: Any) -> bool:
    """Of the compiled core, which may be missing, or of ``dpcore.reference``."""
    return all(hasattr(found, name) for name in (*_FIELDS, "moves"))


def _from_schedule(found: Any) -> Schedule:
    if isinstance(found, Schedule):
        return found
    fields = {name: getattr(found, name) for name in _FIELDS}
    return Schedule(**fields, moves=tuple(Move(*move) for move in found.moves))


def _move(found: Any, about: str) -> Move:
    try:
        step, src, dst, chunk, reduce = found
        return Move(index(step), index(src), index(dst), index(chunk), bool(reduce))
    except (TypeError, ValueError):
        raise Unsupported(
            f"{about}: {found!r} is not a move (step, src, dst, chunk, reduce)"
        ) from None


def _takes_root(function: Callable[..., Any]) -> bool:
    """Whether it is a function of the number of ranks and a root, as in ``dpcore.reference``."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # of compiled code
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [one for one in parameters if one.kind in kinds and one.default is one.empty]
    return len(required) > 1
