"""Judges a file: every check of an exercise, in words.

A check is a function of the exercise's ``check.py`` whose name begins with ``check_``. Its
docstring is what has to hold; it takes a ``Lab``, asks it for runs, and raises ``Wrong`` with what
does not.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dpcore.school.exercise import on_rank
from dpcore.school.exercise.catalogue import Exercise
from dpcore.school.exercise.explaining import Origin, explained
from dpcore.school.exercise.lab import Lab, NotSeen, Wrong
from dpcore.school.exercise.replay import Replay, replay
from dpcore.school.exercise.student_comm import Call

SEED_BITS = 48  # a reader of JSON may take numbers for doubles


@dataclass(frozen=True)
class Result:
    """The result of one check. ``holds``: None where there was nothing to judge."""

    name: str
    says: str
    holds: bool | None
    why: str = ""


@dataclass
class Verdict:
    """The results of all checks of a file."""

    exercise: Exercise
    file: Path
    sha256: str
    results: list[Result] = field(default_factory=list)
    seed: int = 0
    seconds: float = 0.0
    printed: dict[int, str] = field(default_factory=dict)
    measured: dict[str, Any] = field(default_factory=dict)

    @property
    def held(self) -> int:
        return sum(result.holds is True for result in self.results)

    @property
    def passed(self) -> bool:
        return self.held == len(self.results)


def checks_of(exercise: Exercise) -> dict[str, Callable[[Lab], None]]:
    """By name, in the order in which they are written."""
    module = on_rank.load(str(exercise.check), f"check_{exercise.place.name}")
    return {
        name.removeprefix("check_"): check
        for name, check in vars(module).items()
        if name.startswith("check_")
    }


def says(check: Callable[[Lab], None]) -> str:
    """What has to hold."""
    return " ".join((check.__doc__ or "").split())


def judge(
    exercise: Exercise, file: Path, only: Collection[str] = (), seed: int | None = None
) -> Verdict:
    """Runs every check on the file, or ``only`` those with these names. Without a ``seed``, one is
    drawn that no solution can know."""
    importlib.import_module("dpcore._C")  # where it can't be loaded, it says what to install
    data = file.read_bytes()
    seed = secrets.randbits(SEED_BITS) if seed is None else seed
    verdict = Verdict(exercise, file, hashlib.sha256(data).hexdigest(), seed=seed)
    begin = time.monotonic()
    problem = _cannot_be_read(data, file)
    lab = Lab(exercise.check, file, seed)
    for name, check in checks_of(exercise).items():
        if only and name not in only:
            continue
        if problem:
            result = Result(name, says(check), False if not verdict.results else None, problem)
            verdict.results.append(result)
            problem = problem if problem.startswith("see") else "see above"
            continue
        verdict.results.append(_judged(name, check, lab))
    verdict.printed, verdict.measured = lab.printed, lab.measured
    verdict.seconds = time.monotonic() - begin
    return verdict


def _cannot_be_read(data: bytes, file: Path) -> str:
    try:
        compile(data, file.name, "exec")
    except (SyntaxError, ValueError) as problem:
        return f"{file.name} is not valid Python: {problem}"
    return ""


def _judged(name: str, check: Callable[[Lab], None], lab: Lab) -> Result:
    try:
        check(lab)
    except Wrong as problem:
        return Result(name, says(check), False, str(problem))
    except NotSeen as problem:
        return Result(name, says(check), None, str(problem))
    except (TypeError, ValueError, LookupError, AttributeError) as problem:
        return Result(name, says(check), False, f"what came back can't be judged: {problem}")
    return Result(name, says(check), True)


# ---- what checks say ---------------------------------------------------------------------------


def need(condition: Any, words: str) -> None:
    """Raises ``Wrong`` with these words unless the condition holds."""
    if not condition:
        raise Wrong(words)


def need_values(
    found: Any, expected: Any, what: str, tolerance: float = 1e-6, origin: Origin | None = None
) -> None:
    """Raises ``Wrong`` unless two arrays, or lists or dictionaries of them, are the same up to
    rounding; with what they are instead, if their ``origin`` tells it, and the first wrong one."""
    origin = origin or Origin()
    if isinstance(expected, dict):
        need(isinstance(found, dict), f"{what}: {_shown(found)} is not a dictionary of tensors")
        for name in {**expected, **found}:
            need(name in found, f"{what}: {name} has none")
            need(name in expected, f"{what}: {name} has one, and should have none")
            its = origin.part(name)
            need_values(found[name], expected[name], f"{what}, {name}", tolerance, its)
        return
    if isinstance(expected, list):
        need(
            isinstance(found, list) and len(found) == len(expected),
            f"{what}: {_shown(found)} came, and {len(expected)} arrays are right",
        )
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            its = origin.part(number)
            need_values(one, other, f"{what}, number {number}", tolerance, its)
        return
    need(not isinstance(found, list), f"{what}: a list or tuple came, and a tensor is right")
    need(isinstance(found, np.ndarray | float | int), f"{what}: {_shown(found)} is not a tensor")
    is_tensor = isinstance(found, np.ndarray) and isinstance(expected, np.ndarray)
    need(
        not is_tensor or found.dtype == expected.dtype,
        f"{what}: the tensor is of type {getattr(found, 'dtype', '')}, and "
        f"{getattr(expected, 'dtype', '')} is right, as that of what was handed over",
    )
    found, expected = np.asarray(found), np.asarray(expected)
    need(
        found.shape == expected.shape,
        f"{what}: the shape is {list(found.shape)}, and {list(expected.shape)} is right",
    )
    scale = np.abs(expected).max(initial=1e-30)
    wrong = np.flatnonzero(~(np.abs(found - expected) <= tolerance * scale))  # NaN is wrong as well
    if wrong.size:
        at = int(wrong[0])
        why = explained(found, expected, origin, tolerance)
        why = why or f"{wrong.size} of {expected.size} elements are wrong"
        raise Wrong(
            f"{what}: {why}; element {at} is {found.reshape(-1)[at]:.6g}, and "
            f"{expected.reshape(-1)[at]:.6g} is right"
        )


def need_same(
    found: Any, expected: Any, what: str, others: Mapping[str, Any] | None = None
) -> None:
    """Raises ``Wrong`` unless both are equal to the last bit. ``others``: what else it could be to
    the last bit, by how it came about."""
    need_values(found, expected, what)
    found, expected = np.asarray(found), np.asarray(expected)
    if found.tobytes() == expected.tobytes():
        return
    for how, other in (others or {}).items():
        need(found.tobytes() != np.asarray(other).tobytes(), f"{what}: the last bits differ: {how}")
    most = np.abs(found - expected).max()
    raise Wrong(
        f"{what}: the last bits differ, by at most {most:.1e}: the same numbers, added in another "
        "order"
    )


def need_waited(misuse: Sequence[Sequence[str]]) -> None:
    """Raises ``Wrong`` if a rank has done something wrong with operations in flight."""
    for rank, words in enumerate(misuse):
        need(not words, f"rank {rank}: {words and words[0]}")


def need_to_end(calls: Sequence[Sequence[Sequence[Any]]]) -> Replay:
    """Raises ``Wrong`` if ranks with these calls stand still where no message is kept."""
    ranks = [[Call(*one) for one in of_rank] for of_rank in calls]
    found = replay(ranks)
    stopped = {
        rank: f"wait() for its {ranks[rank][call.work]}" if call.name == "wait" else str(call)
        for rank, call in found.stopped.items()
    }
    where = ", ".join(f"rank {rank} in {call}" for rank, call in stopped.items())
    need(
        not where,
        "dpcore keeps a message until it is received. Where a send waits for its receiver, these "
        f"ranks wait for each other for ever: {where}",
    )
    return found


def need_written(found: Any, before: Any, world: int, what: str) -> None:
    """Raises ``Wrong`` if the vector that was handed over is what it was; alone, it may be."""
    need(
        world == 1 or not np.array_equal(found, before),
        f"{what}: the vector is what it was before the call. Either the sum never came to this "
        "rank, or `vector = ...` has made another vector: the sum has to be written into this one, "
        "as `+=`, `vector.copy_(...)` and `comm.recv(vector, ...)` do",
    )


def in_words(sent: Sequence[Any]) -> str:
    """What was sent, such as "2 times all_reduce of 512 bytes"."""
    groups = [(key, len(list(same))) for key, same in itertools.groupby(tuple(one) for one in sent)]
    words = [
        f"{f'{count} times ' if count > 1 else ''}{name} of {nbytes} bytes"
        for (name, nbytes), count in groups
    ]
    return ", ".join(words) or "nothing"


def _shown(value: Any) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) < 60 else f"{text[:57]}..."
