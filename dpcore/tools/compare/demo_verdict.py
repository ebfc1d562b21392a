"""Who wins a scene of the demo, by how much and why: sentences from what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from dpcore.tools.compare.figures import added, ms
from dpcore.tools.compare.training.ranks import ALONE
from dpcore.tools.ratios import LEAST_ROUNDS, Estimate, estimate, of_slowest_rank, paired


@dataclass(frozen=True)
class Verdict:
    """``ratio``: dpcore's step over torch DDP's. ``costs``: milliseconds that communication adds to
    computing alone, by dpcore and by torch DDP."""

    where: str
    ratio: Estimate
    costs: tuple[Estimate, Estimate]

    @property
    def winner(self) -> str:
        if not self.ratio.is_conclusive:
            return ""
        return "dpcore" if self.ratio.median < 1 else "torch DDP"

    @property
    def brief(self) -> str:
        """By how much the winner's step is shorter, for the one sentence at the end."""
        if self.ratio.confidence is None:
            return f"{too_few(self.ratio)} to tell which wins {self.where}"
        if not self.winner:
            return f"neither dpcore nor torch DDP is faster {self.where}"
        loser = "torch DDP" if self.winner == "dpcore" else "dpcore"
        return f"{self.winner}'s step is {self._shorter} shorter than {loser}'s {self.where}"

    @property
    def clause(self) -> str:
        """Who won, by how much, and why."""
        ours, torchs = self.costs
        if self.ratio.confidence is None:
            return f"{too_few(self.ratio)} to tell which wins {self.where}"
        if not self.winner:
            return (
                f"neither wins {self.where}, where their steps differ by less than they scatter "
                f"(communication adds {added(ours)} with dpcore and {added(torchs)} with torch DDP)"
            )
        first, second = (ours, torchs) if self.winner == "dpcore" else (torchs, ours)
        said = f"{self.winner} wins {self.where}, its step {self._shorter} shorter"
        if second.low > 0 and first.median < second.median:
            said += (
                f" since communication adds {added(first)} to computing instead of {added(second)}"
            )
        return said

    @property
    def _shorter(self) -> str:
        shorter = 1 - (self.ratio.median if self.winner == "dpcore" else 1 / self.ratio.median)
        return f"{shorter:.{0 if shorter >= 0.1 else 1}%}"

    @property
    def said(self) -> str:
        """With the interval, below the table of a scene."""
        clause = self.clause if self.winner else f"{self.clause[0].upper()}{self.clause[1:]}"
        rounds = f", {self.ratio.rounds} rounds" if self.ratio.confidence else ""
        ratio = f"{self.ratio.median:.3f}, {self.ratio.between()}{rounds}"
        return f"{clause}. (dpcore's step over torch DDP's: {ratio}.)"


def too_few(of: Estimate) -> str:
    return f"{of.rounds} round{' is' if of.rounds == 1 else 's are'} too few"


def verdict(where: str, result: dict[str, Any], torchs: str, ours: str, steps: int) -> Verdict:
    """From the seconds of every rank and step, ``steps`` to a round."""
    rounds = {name: _rounds(times, steps) for name, times in result["seconds"].items()}
    alone = rounds.get(ALONE, [0.0] * len(rounds[ours]))
    mine, its = (
        estimate([(step - bare) * 1e3 for step, bare in zip(rounds[name], alone, strict=True)])
        for name in (ours, torchs)
    )
    return Verdict(where, paired(rounds[ours], rounds[torchs]), (mine, its))


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
        "the sizes fit what it has measured of the link, and were not set by hand"
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
    ours, torchs = verdict.costs
    if exposed is not None and exposed[0] > exposed[1]:
        slower = [
            max(0.0, cost.median - part) for cost, part in zip(verdict.costs, exposed, strict=True)
        ]
        after = choice is not None and choice["schedule"] == "sequential"
        longer = f"dpcore's exposed time is {ms(exposed[0] - exposed[1])} longer"
        what = "since it sends after backward, " if after else ""
        said.append(
            f"{longer}: {what}communication "
            f"waits there instead of slowing down computing, which it lengthens by "
            f"{ms(slower[0])} here and by {ms(slower[1])} with torch DDP; a step pays for both."
            if slower[0] < slower[1]
            else f"{longer}{', since it sends after backward' if after else ''}."
        )
    ratio = verdict.ratio
    if ratio.median > 1 and ratio.confidence is None:
        said.append(
            f"dpcore's step is longer here, and {too_few(ratio)} to conclude anything: another run "
            f"may say the opposite; {LEAST_ROUNDS} are the least."
        )
    elif ratio.median > 1 and not ratio.is_conclusive:
        said.append(
            "dpcore's step is longer by less than steps scatter from round to round: another run "
            "may say the opposite; more --rounds would tell."
        )
    elif ratio.median > 1:
        why = (
            f" since its communication adds {added(ours)} and torch DDP's {added(torchs)}"
            if ours.low > 0 and torchs.median < ours.median
            else ""
        )
        said.append(
            f"dpcore's step is longer{why}; `dpcore compare` with --contenders "
            "bucketed:1,sequential,torch says which schedule would suit this machine."
        )
    return said


def goes_on(beside_torch: Verdict, beside_default: Verdict) -> str:
    """What schedule="zero1" adds, over a link."""
    torchs, default = beside_torch.ratio, beside_default.ratio
    said = (
        "With schedule='zero1' and dpcore.DistributedOptimizer, communication goes on under the "
        f"next forward: dpcore's step is then {torchs.median:.2f} of torch DDP's "
        f"({torchs.between(2)}) and {default.median:.2f} of its own default's "
        f"({default.low:.2f} to {default.high:.2f})."
    )
    if not default.is_conclusive:
        rounds = f"{default.rounds} round{' does' if default.rounds == 1 else 's do'}"
        said += f" {rounds} not tell whether its step is shorter or longer than the default's."
    return said


def ending(verdicts: Sequence[Verdict]) -> str:
    """The one sentence at the end, short enough to be repeated."""
    if not verdicts:
        return "There is no result: no scene ran to its end."
    return f"In short: {', and '.join(one.brief for one in verdicts)}."
