"""Who wins a scene of the demo, by how much and why: sentences from what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from dpcore.compare.figures import conclusive, ms
from dpcore.compare.ratios import Estimate, of_slowest_rank, paired
from dpcore.compare.training.ranks import ALONE


@dataclass(frozen=True)
class Verdict:
    """``costs_ms``: what communication adds to computing alone, by dpcore and by torch DDP."""

    where: str
    ratio: Estimate
    rounds: int
    costs_ms: tuple[float, float]

    @property
    def sure(self) -> bool:
        return conclusive(self.ratio, self.rounds)

    @property
    def winner(self) -> str:
        if not self.sure:
            return ""
        return "dpcore" if self.ratio.median < 1 else "torch DDP"

    @property
    def clause(self) -> str:
        """Who won, by how much, and why, for the one sentence at the end."""
        ours, torchs = self.costs_ms
        if not self.winner:
            return (
                f"neither wins {self.where}, where a step scatters by more than dpcore and torch "
                f"DDP differ in what communication adds to it ({ms(ours)} and {ms(torchs)})"
            )
        first, second = (ours, torchs) if self.winner == "dpcore" else (torchs, ours)
        takes = self.ratio.median if self.winner == "dpcore" else 1 / self.ratio.median
        added = "nothing that can be measured" if first <= 0 else ms(first)
        return (
            f"{self.winner} wins {self.where}, its step {1 - takes:.0%} shorter since "
            f"communication adds {added} to computing instead of {ms(second)}"
        )

    @property
    def said(self) -> str:
        """With the interval, below the table of a scene."""
        low, high = self.ratio.low, self.ratio.high
        return (
            f"{self.clause[0].upper() if not self.winner else self.clause[0]}{self.clause[1:]}. "
            f"(dpcore's step over torch DDP's: {self.ratio.median:.3f}, 95% between {low:.3f} and "
            f"{high:.3f}, {self.rounds} rounds.)"
        )


def verdict(where: str, result: dict[str, Any], torchs: str, ours: str, steps: int) -> Verdict:
    """From the seconds of every rank and step, ``steps`` to a round."""
    rounds = {name: _rounds(times, steps) for name, times in result["seconds"].items()}
    alone = rounds.get(ALONE, [0.0] * len(rounds[ours]))
    mine, its = (
        median(step - bare for step, bare in zip(rounds[name], alone, strict=True)) * 1e3
        for name in (ours, torchs)
    )
    return Verdict(where, paired(rounds[ours], rounds[torchs]), len(alone), (mine, its))


def _rounds(of_ranks: Sequence[Sequence[float]], steps: int) -> list[float]:
    times = of_slowest_rank(of_ranks)
    return [mean(times[at : at + steps]) for at in range(0, len(times), steps)]


def means(choice: dict[str, Any] | None, is_link: bool, by_nccl: bool = False) -> str:
    """What dpcore does to that end, as far as the first steps chose it."""
    if choice is None:
        return ""
    count = len(choice["bucket_bytes"])
    buckets = "one bucket" if count == 1 else f"{count} buckets"
    when = (
        f"sends {buckets} while backward still computes"
        if choice["schedule"] == "bucketed"
        else f"sends {buckets} after backward, which computes with nothing beside it"
    )
    way = (
        "the sizes fit what it has measured of the link, and nobody set them"
        if is_link
        else "NCCL averages them on the GPUs"
        if by_nccl
        else "ranks of one host average them in memory that all have mapped, without copies"
    )
    return f"Here dpcore {when}; {way}."


def behind(
    verdict: Verdict, exposed: tuple[float, float] | None, choice: dict[str, Any] | None
) -> list[str]:
    """Why dpcore is behind in a column of the table, wherever it is. ``exposed``: milliseconds by
    dpcore and by torch DDP."""
    said = []
    ours, torchs = verdict.costs_ms
    if exposed is not None and exposed[0] > exposed[1]:
        slower = [
            max(0.0, cost - part) for cost, part in zip(verdict.costs_ms, exposed, strict=True)
        ]
        after = choice is not None and choice["schedule"] == "sequential"
        what = "since it sends after backward, " if after else ""
        said.append(
            f"dpcore's exposed time is {ms(exposed[0] - exposed[1])} longer: {what}communication "
            f"waits there instead of slowing down computing, which it lengthens by "
            f"{ms(slower[0])} here and by {ms(slower[1])} with torch DDP; a step pays for both."
        )
    if verdict.ratio.median > 1 and not verdict.sure:
        said.append(
            "dpcore's step is longer by less than steps scatter from round to round: another run "
            "may say the opposite; more --rounds would tell."
        )
    elif verdict.ratio.median > 1:
        said.append(
            f"dpcore's step is longer since its communication adds {ms(ours)} and torch DDP's "
            f"{ms(torchs)}; `dpcore compare` with --contenders bucketed:1,sequential,torch says "
            "which schedule would suit this machine."
        )
    return said


def goes_on(beside_torch: Verdict, beside_default: Verdict) -> str:
    """What schedule="zero1" adds, over a link."""
    torchs, default = beside_torch.ratio, beside_default.ratio
    said = (
        "With schedule='zero1' and dpcore.DistributedOptimizer, communication goes on under the "
        f"next forward: dpcore's step is then {torchs.median:.2f} of torch DDP's (95% between "
        f"{torchs.low:.2f} and {torchs.high:.2f}) and {default.median:.2f} of its own default's "
        f"({default.low:.2f} to {default.high:.2f})."
    )
    if default.high >= 1:
        said += " That it is shorter than the default's is not sure after so few rounds."
    return said


def ending(verdicts: Sequence[Verdict]) -> str:
    """The one sentence at the end."""
    if not verdicts:
        return "Nobody won: no scene ran to its end."
    text = "; ".join(one.clause for one in verdicts)
    return f"In short: {text}."
