"""What wrong values look like, in words: sums instead of means, a rank's own, another order.

Most mistakes in a collective leave a value that is made of the right parts in the wrong amounts. So
if it is known what each rank put in, the amounts tell the mistake.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

ABOUT_NAN = (
    "not a number. A tensor in flight is none until wait() of its operation has returned, and "
    "infinities make more of them"
)
_SHARES = {2: "half", 3: "a third", 4: "a quarter", 9: "a ninth", 16: "a sixteenth"}


@dataclass(frozen=True)
class Origin:
    """What a value is made of: ``terms[r]`` is what rank r puts in, and ``rank`` whose it is. Where
    it was made by a step, ``before`` is what the step began with."""

    terms: Sequence[Any] = ()
    rank: int = -1
    others: dict[str, Any] = field(default_factory=dict)  # what else it could be, by its name
    before: Any = None

    def part(self, key: Any) -> Origin:
        """The same of one of several values, for which terms are lists or dictionaries."""
        terms = [term[key] for term in self.terms]
        others = {name: one[key] for name, one in self.others.items()}
        return Origin(terms, self.rank, others, None if self.before is None else self.before[key])


def explained(found: Any, right: Any, origin: Origin, tolerance: float = 1e-6) -> str:
    """What these values are instead of the right ones; "" if they look like nothing known.

    >>> mine, its = np.array([1.0, 2, 5]), np.array([3.0, 0, 1])
    >>> explained(mine + its, (mine + its) / 2, Origin([mine, its], 0))
    'they are the sums over 2 ranks, and not the means'
    >>> explained(mine, mine + its, Origin([mine, its], 0))
    "they are still this rank's own"
    """
    found, right = np.asarray(found), np.asarray(right)
    broken = int((~np.isfinite(found) & np.isfinite(right)).sum())
    if broken:
        return f"{broken} of {found.size} elements are {ABOUT_NAN}"
    if found.size > 1 and np.abs(found).max() < 1e-30 < np.abs(right).max():
        return "they are all zero" if not found.any() else "they are memory that was never written"
    for name, other in origin.others.items():
        if _near(found, other, right, tolerance):
            return f"they are {name}"
    terms = [np.asarray(term).reshape(-1) for term in origin.terms]
    return (
        _of_amounts(found.reshape(-1), right.reshape(-1), terms, origin.rank, tolerance)
        or _of_places(found.reshape(-1), right.reshape(-1), tolerance)
        or _of_chunks(found.reshape(-1), right.reshape(-1), terms, origin.rank, tolerance)
        or _of_precision(found, right, tolerance)
        or _of_step(found, right, origin.before)
    )


def _near(one: Any, other: Any, scale: Any, tolerance: float) -> bool:
    one, other = np.asarray(one), np.asarray(other)
    bound = tolerance * np.abs(scale).max(initial=1e-30)
    return one.shape == other.shape and bool((np.abs(one - other) <= bound).all())


def _of_amounts(found: Any, right: Any, terms: Sequence[Any], rank: int, tolerance: float) -> str:
    """Where it is a multiple of the right ones, or of ranks' terms."""
    world = len(terms)
    amounts = _amounts(found, terms, tolerance)
    usual = _amounts(right, terms, tolerance)
    if amounts is not None and usual is not None and np.ptp(usual) < 1e-3 and usual[0] > 1e-3:
        return _of_ranks(amounts, rank, world, is_mean=usual[0] < 0.75 and world > 1)
    if found.size < 2 or not right.any():
        return ""
    factor = float(found @ right / (right @ right))
    if abs(factor) > 1e-6 and _near(found, factor * right, found, tolerance):
        return f"they are {_times(factor)} the right ones"
    return ""


def _amounts(values: Any, terms: Sequence[Any], tolerance: float) -> Any:
    """How much of each rank's term is in the values, if they are made of nothing else."""
    if not terms or values.size < len(terms) or any(term.size != values.size for term in terms):
        return None
    columns = np.stack(terms, axis=1).astype(np.float64)
    amounts, _, independent, _ = np.linalg.lstsq(columns, values, rcond=None)
    is_sum = independent == len(terms) and _near(columns @ amounts, values, columns, tolerance)
    return np.round(amounts, 4) + 0.0 if is_sum else None


def _of_ranks(amounts: Any, rank: int, world: int, is_mean: bool) -> str:
    """Amounts of each rank's term, where 1 is right, or 1 / world."""
    whose, right = np.flatnonzero(amounts), 1 / world if is_mean else 1
    if np.ptp(amounts) < 1e-3:
        return _of_all(float(amounts[0]) / right, world, is_mean)
    for unit in (right, 1 if is_mean else 1 / world):
        counts = amounts / unit
        if not np.allclose(counts, np.round(counts), atol=1e-2):
            continue
        divided = {1: "", 1 / world: f", divided by {world}"}[unit]
        if whose.size == 1 and abs(counts[whose[0]] - 1) < 1e-2:
            own = "still this rank's own" if whose[0] == rank else f"those of rank {whose[0]} alone"
            return f"they are {own}{divided}"
        if whose.size == 1 and abs(counts[whose[0]] - world) < 1e-2:
            continue  # of a mean
        said = [f"rank {one}'s are missing" for one in np.flatnonzero(np.abs(counts) < 0.5)]
        several = np.flatnonzero(np.abs(counts) > 1.5)
        said += [f"rank {one}'s are in it {counts[one]:.0f} times" for one in several]
        undivided = f", and nothing is divided by {world}" if is_mean else f", and all is{divided}"
        return " and ".join(said) + (undivided if unit != right else "")
    return "they have " + ", ".join(f"{one:.3g} times rank {n}'s" for n, one in enumerate(amounts))


def _of_all(factor: float, world: int, is_mean: bool) -> str:
    """Where each rank's term is in it this many times too often."""
    if is_mean and abs(factor - world) < 1e-2:
        return f"they are the sums over {world} ranks, and not the means"
    if not is_mean and abs(factor * world - 1) < 1e-2:
        return f"they are the means over {world} ranks, and not the sums"
    why = ": added twice?" if abs(factor - 2) < 1e-2 or abs(factor - world) < 1e-2 else ""
    for times, words in ((1, ": averaged twice?"), (2, ": averaged three times?")):
        if is_mean and abs(factor * world**times - 1) < 1e-2:
            why = words
    return f"they are {_times(factor)} the right ones{why}"


def _times(factor: float) -> str:
    for parts, words in _SHARES.items():
        if abs(factor * parts - 1) < 1e-3:
            return f"{words} of"
    return "minus" if abs(factor + 1) < 1e-3 else f"{factor:.4g} times"


def _of_places(found: Any, right: Any, tolerance: float) -> str:
    """Where the right values are in the wrong places."""
    if found.size < 2 or not _near(np.sort(found), np.sort(right), right, tolerance):
        return ""
    if _near(found, right[::-1], right, tolerance):
        return "they are the right ones in reverse order"
    return "they are the right ones in the wrong places"


def _of_chunks(found: Any, right: Any, terms: Sequence[Any], rank: int, tolerance: float) -> str:
    """Where each chunk has an explanation of its own, as in a ring."""
    world = len(terms)
    if world < 2 or found.size < 4 * world * world:
        return ""
    cut = [np.array_split(one, world) for one in (found, right, *terms)]
    said = []
    for number, (one, other, *its) in enumerate(zip(*cut, strict=True)):
        if _near(one, other, right, tolerance):
            continue
        why = _of_amounts(one, other, its, rank, tolerance)
        place = [n for n, c in enumerate(cut[1]) if n != number and _near(one, c, right, tolerance)]
        why = f"what belongs into chunk {place[0]}" if place else why
        if not why:
            return ""
        said.append(f"chunk {number}: {why.removeprefix('they are ')}")
    return "; ".join(said)


def _of_step(found: Any, right: Any, before: Any) -> str:
    """Where the step that was made is a multiple of the right one."""
    if before is None:
        return ""
    why = _of_amounts((found - before).ravel(), (right - before).ravel(), (), -1, 1e-6)
    return f"as steps from where they began, {why}" if why else ""


def _of_precision(found: Any, right: Any, tolerance: float) -> str:
    """Where only some digits are right."""
    error = float(np.abs(found - right).max() / max(float(np.abs(right).max()), 1e-30))
    for bits, least, most in ((16, 1e-5, 4e-3), (32, 1e-9, 1e-6)):
        if max(tolerance, least) < error < most:
            return f"they are right to {error:.0e} of the largest: was a type of {bits} bits used?"
    return ""


def sums_in_other_ways(terms: Sequence[Any], rank: int = 0) -> dict[str, Any]:
    """The sums of ranks' terms on a rank, which are right but for the last bits, by how they were
    added. The usual mistakes come first, since the first two ranks may be exchanged."""
    world, found = len(terms), {}
    others = [other for other in range(world) if other != rank]
    usual = [tuple(reversed(range(world))), (rank, *others), (*others, rank)]
    whole = sum(term.astype(np.float64) for term in terms)
    found["they were added in double precision, and rounded at the end"] = whole.astype(
        terms[0].dtype
    )
    for order in (*usual, *itertools.permutations(range(world))):
        if list(order) != sorted(order):
            total = np.zeros_like(terms[0])
            for rank in order:
                total = total + terms[rank]
            found[f"ranks were added in the order {', '.join(map(str, order))}"] = total
    if world == 4:
        found["they were added in pairs"] = (terms[0] + terms[1]) + (terms[2] + terms[3])
    return found
