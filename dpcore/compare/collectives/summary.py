"""From seconds to figures: bandwidths, and ratios against the best peer and against the bound."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from dpcore.compare.collectives.interleave import Measurement
from dpcore.ddp.overlap import median_interval

# Below, the bound measures its own call from Python and not memory: no ratio is shown.
BOUND_FROM_BYTES = 1 << 20


@dataclass(frozen=True)
class Figures:
    """Of one contender in one cell. Rates are GB/s (10^9), as in nccl-tests."""

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


def of_slowest_rank(of_ranks: Iterable[Sequence[float]]) -> list[float]:
    """Round by round the time of the rank that took longest, from the rounds of each rank."""
    return [max(times) for times in zip(*of_ranks, strict=True)]


@dataclass(frozen=True)
class Ratio:
    """The median of the ratios of two contenders' rounds, and where the true one lies with a
    confidence of 95% (the whole range below 6 rounds, which are too few)."""

    median: float
    low: float
    high: float


def paired(ours: Sequence[float], others: Sequence[float]) -> Ratio:
    """Of times in the same rounds: what makes the machine slow for a while makes both slow."""
    ratios = [mine / other for mine, other in zip(ours, others, strict=True)]
    return Ratio(median(ratios), *median_interval(ratios, 0.05))


def total_wrong(results: Sequence[Measurement]) -> int:
    return sum(result.wrong or 0 for result in results)
