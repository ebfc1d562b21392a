"""The loop of measurement: a contender's ranks are told to prepare a cell, and to repeat it.

The ranks are processes of their own (`group.py`), or those of a launcher, of which this program is
one (`../bench.py`): to both goes the same command, and every rank has an answer.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from dpcore.tools.compare.collectives.cells import Cell
from dpcore.tools.compare.collectives.contenders import Contender

SLOWEST_BYTES_PER_SECOND = 50e6  # what is slower than this counts as hung
PATIENCE_SECONDS = 30.0
LONG_SECONDS = 0.5  # an operation that takes this long is a round by itself


@dataclass(frozen=True)
class Pace:
    rounds: int = 7
    round_seconds: float = 0.03
    least_iterations: int = 3
    most_iterations: int = 20_000
    most_seconds: float = 20.0  # of one contender in one cell; it then has fewer rounds


@dataclass
class Measurement:
    cell: Cell
    contender: Contender
    iterations: int = 0
    rounds: list[float] = field(default_factory=list)  # seconds per operation, slowest rank
    wrong: int | None = None
    missing: str = ""  # why there are no figures
    unsupported: bool = False  # that is why: it has no such operation
    typical: float = 0.0  # seconds of an operation, when it last ran
    facts: dict[str, Any] = field(default_factory=dict)


class Ranks(Protocol):
    def ask(self, command: dict[str, Any], seconds: float) -> list[dict[str, Any]]:
        """Lets all ranks obey a command and returns their answers in rank order."""


def prepare(ranks: Ranks, result: Measurement) -> None:
    """Makes the buffers, and checks what the operation leaves in them."""
    command = {"variant": result.contender.variant, "cell": asdict(result.cell)}
    seconds = PATIENCE_SECONDS + _patience(result.cell)
    replies = ranks.ask({"do": "prepare", **command}, seconds)
    if found := next((reply for reply in replies if "unsupported" in reply), None):
        result.missing, result.unsupported = found["unsupported"], True
        return
    counts = [int(reply["wrong"]) for reply in replies if reply["wrong"] is not None]
    result.wrong = sum(counts) if counts else None


def calibrate(ranks: Ranks, result: Measurement, pace: Pace) -> None:
    """How often to repeat so that a round takes its time; also warms every page and path."""
    iterations = 1
    while True:
        # The faster of two: one that was preempted must not end the search.
        seconds = min(_run(ranks, result, iterations), _run(ranks, result, iterations))
        enough = iterations * seconds >= pace.round_seconds / 4
        if enough or iterations == pace.most_iterations:
            break
        iterations = min(iterations * 4, pace.most_iterations)
    result.typical = seconds
    if seconds >= LONG_SECONDS:
        result.iterations = 1
        return
    wanted = int(pace.round_seconds / max(seconds, 1e-9))
    result.iterations = min(max(wanted, pace.least_iterations), pace.most_iterations)


def one_round(ranks: Ranks, result: Measurement, pace: Pace) -> None:
    if sum(result.rounds) * result.iterations > pace.most_seconds:
        return
    # A few untimed operations first: the ranks have slept, their caches belong to others.
    warm = max(1, result.iterations // 10) if result.iterations > 1 else 0
    seconds = _run(ranks, result, result.iterations, warm, warm * result.typical)
    result.typical = seconds
    result.rounds.append(seconds * result.cell.kind.time_share)


def release(ranks: Ranks) -> dict[str, Any]:
    """Frees the buffers; what the contender says about itself after the cell."""
    facts: dict[str, Any] = ranks.ask({"do": "release"}, PATIENCE_SECONDS)[0]["facts"]
    return facts


def _run(
    ranks: Ranks, result: Measurement, iterations: int, warm: int = 0, warm_seconds: float = 0.0
) -> float:
    replies = ranks.ask(
        {
            "do": "run",
            "variant": result.contender.variant,
            "iterations": iterations,
            "warm": warm,
            "start_at": time.monotonic() + 0.002 + 1.5 * warm_seconds,
        },
        PATIENCE_SECONDS + _patience(result.cell) * (iterations + warm),
    )
    return float(max(reply["seconds"] for reply in replies))


def _patience(cell: Cell) -> float:
    return (1e-3 + cell.bytes / SLOWEST_BYTES_PER_SECOND) * cell.world
