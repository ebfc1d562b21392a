"""From seconds to figures: bandwidths, and ratios against the best peer and against the bound."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from dpcore.tools.compare.collectives.cells import ROOT
from dpcore.tools.compare.collectives.loop import Measurement

# Below, the bound measures its own call from Python and not memory: no ratio is shown.
BOUND_FROM_BYTES = 1 << 20


@dataclass(frozen=True)
class Figures:
    """The figures of one contender in one cell. Rates are GB/s (10^9), as in nccl-tests."""

    median_s: float
    min_s: float
    algbw: float
    busbw: float
    peer_ratio: float | None = None  # speed over the fastest peer's: above 1 is faster
    bound_ratio: float | None = None  # speed over the bound's: 1 is all the memory allows


def summarise(results: Sequence[Measurement]) -> list[Figures | None]:
    """In the order of the results; None where nothing was measured."""
    medians = {r.contender.name: median(r.rounds) for r in results if r.rounds}
    peers = [medians[r.contender.name] for r in results if r.contender.role == "peer" and r.rounds]
    best_peer = min(peers, default=None)
    figures: list[Figures | None] = []
    for result in results:
        if not result.rounds:
            figures.append(None)
            continue
        seconds = medians[result.contender.name]
        algbw = result.cell.bytes / seconds / 1e9
        bound = medians.get(result.contender.bound)
        if result.cell.bytes < BOUND_FROM_BYTES:
            bound = None
        is_bound = result.contender.role == "bound"
        figures.append(
            Figures(
                median_s=seconds,
                min_s=min(result.rounds),
                algbw=algbw,
                busbw=algbw * result.cell.kind.bus_factor(result.cell.world),
                peer_ratio=best_peer / seconds if best_peer and not is_bound else None,
                bound_ratio=bound / seconds if bound and not is_bound else None,
            )
        )
    return figures


def total_wrong(results: Sequence[Measurement]) -> int:
    return sum(result.wrong or 0 for result in results)


def records(facts: dict[str, Any], results: Sequence[Measurement]) -> list[dict[str, Any]]:
    """One per contender of a cell, complete enough to be judged without the machine."""
    lines = []
    for result, figures in zip(results, summarise(results), strict=True):
        cell = result.cell
        line = facts | {
            "load": os.getloadavg()[0],
            "collective": cell.collective,
            "world": cell.world,
            "bytes": cell.bytes,
            "count": cell.elements,
            "type": cell.dtype,
            "redop": cell.redop,
            "root": ROOT if cell.kind.rooted else -1,
            "algorithm": cell.algorithm,
            "contender": result.contender.name,
            "role": result.contender.role,
            "iterations": result.iterations,
            "rounds_s": result.rounds,
            "wrong": result.wrong,
        }
        if figures is not None:
            line |= vars(figures)
        if result.missing:
            line["missing"] = result.missing
        if result.facts:
            line["facts"] = result.facts
        lines.append(line)
    return lines
