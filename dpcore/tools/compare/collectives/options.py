"""What a run over collectives is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpcore.base.user_code import is_own
from dpcore.tools.compare.collectives.contenders import MPICH_OVERSUBSCRIBED, PEERS, tuning
from dpcore.tools.compare.collectives.loop import Pace


@dataclass(frozen=True)
class Options:
    worlds: tuple[int, ...]
    sizes: tuple[int, ...]
    peers: tuple[str, ...]
    pace: Pace
    json: Path | None
    plot: Path | None
    huge_pages: bool

    def settings(self) -> dict[str, Any]:
        return {
            "rounds": self.pace.rounds,
            "round_seconds": self.pace.round_seconds,
            "huge_pages": self.huge_pages,
            "binding": "none",
            "threads_per_rank": 1,
            "tuning": tuning(),
            "mpich_with_more_ranks_than_cores": MPICH_OVERSUBSCRIBED,
        }


def prove_own(algorithms: Iterable[str], collectives: Sequence[str], worlds: Sequence[int]) -> None:
    """Raises what is wrong with algorithms of the user's, before ranks are started for them."""
    for algorithm in filter(is_own, algorithms):
        from dpcore.base.own_algorithm import schedule_of

        for collective in collectives:
            for world in worlds:
                schedule_of(algorithm, collective, world)


def chosen_peers(names: Sequence[str]) -> tuple[str, ...]:
    if list(names) == ["none"]:
        return ()
    if unknown := [name for name in names if name not in PEERS]:
        known = ", ".join(PEERS)
        raise ValueError(f"--peers {unknown[0]!r}: choose from {known}, or none")
    return tuple(names)
