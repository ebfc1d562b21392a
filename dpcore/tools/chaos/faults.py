"""Which fault comes when: it follows from a seed, and from which ranks live at that moment."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

KINDS = ("kill", "pair", "stop", "cut", "slow")  # of ranks, and of the links of hosts
_OF_LINKS = ("cut", "slow")
_STOPPED_SECONDS = (0.05, 1.5)
_CUT_SECONDS = (0.05, 0.8)  # less than TCP and the ranks wait
_SLOW_SECONDS = (0.5, 2.0)


@dataclass(frozen=True)
class Fault:
    """``after`` seconds since the one before; ``choice`` between 0 and 1 says which rank or host,
    ``seconds`` how long it lasts, where it does."""

    kind: str
    after: float
    choice: float
    seconds: float = 0.0


def faults(seed: int, mtbf: float, kinds: Sequence[str]) -> Iterator[Fault]:
    """Without end, ``mtbf`` seconds apart in the mean.

    >>> first = next(faults(7, 20.0, ["kill"]))
    >>> first.kind, round(first.after, 1), round(first.choice, 2)
    ('kill', 7.8, 0.15)
    >>> first == next(faults(7, 20.0, ["kill"]))
    True
    """
    source = random.Random(seed)
    spans = {"stop": _STOPPED_SECONDS, "cut": _CUT_SECONDS, "slow": _SLOW_SECONDS}
    while True:
        after, choice = source.expovariate(1 / mtbf), source.random()
        kind, span = source.choice(list(kinds)), source.random()
        least, most = spans.get(kind, (0.0, 0.0))
        yield Fault(kind, after, choice, least + span * (most - least))


def check_kinds(kinds: Sequence[str], hosts: int) -> None:
    """ValueError for what is unknown, or needs links."""
    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(f"--kinds: {kind!r} is none of {', '.join(KINDS)}")
        if kind in _OF_LINKS and hosts < 2:
            raise ValueError(f"--kinds {kind}: a host has no links; --hosts 2 or more makes some")
