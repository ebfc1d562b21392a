"""Pipeline plans as data: for each rank, the micro-batches and stages it computes, in order.

A model is cut into consecutive stages, and a batch into micro-batches. An *action* is one pass:
``2F5`` is the forward of micro-batch 5 through stage 2, ``2B5`` its backward, ``2I5`` and ``2W5``
the halves of that. docs/parallel.md gives the cost of each plan and when another is better.

``GPipe``            all forwards, then all backwards
``1F1B``             a backward as soon as there can be one
``Interleaved1F1B``  several stages on a rank
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path

from dpcore.comm.communicators.checks import check_integer
from dpcore.errors import Unsupported
from dpcore.parallel import pipeline_costs as pipeline
from dpcore.parallel.pipeline_costs import Action, Price

NAMES = ("GPipe", "1F1B", "Interleaved1F1B")
_OVERLAPPED = re.compile(r"\((.+;.+)\)OVERLAP_F_B")


def pipeline_plan(
    name: str | Path,
    *,
    stages: int | None = None,
    microbatches: int | None = None,
    ranks: int | None = None,
) -> PipelinePlan:
    """A plan by its name, "GPipe", "1F1B" or "Interleaved1F1B", or from a CSV file in torch's form.

    Rank r has the stages r, r + ranks, ... By default each stage has its own rank; under
    "Interleaved1F1B" each rank has two stages.

    >>> print(pipeline_plan("1F1B", stages=2, microbatches=3))
    1F1B: 2 stages on 2 ranks, 3 micro-batches, bubble 25.0%, at most 2 live
    rank 0  F0 F1 .. .. B0 -- F2 B1 -- .. B2 --
    rank 1  .. F0 B0 -- F1 B1 -- F2 B2 -- .. ..
    """
    if str(name).endswith(".csv"):
        return PipelinePlan.from_csv(Path(name).read_text(), Path(name).stem)
    if str(name) not in NAMES:
        raise Unsupported(f"pipeline_plan: {name!r} is neither one of {NAMES} nor a *.csv file")
    if stages is None or microbatches is None:
        raise Unsupported(f"pipeline_plan: {name} needs stages= and microbatches=")
    stages = check_integer(stages, "pipeline_plan: stages")
    microbatches = check_integer(microbatches, "pipeline_plan: microbatches")
    if ranks is not None:
        ranks = check_integer(ranks, "pipeline_plan: ranks")
    ranks = ranks or (stages // 2 if name == "Interleaved1F1B" else stages)
    if min(stages, microbatches, ranks) < 1 or stages % ranks:
        raise Unsupported(
            f"pipeline_plan: {stages} stages on {ranks} ranks with {microbatches} micro-batches; "
            "all must be positive, and each rank must have equally many stages"
        )
    if name != "Interleaved1F1B" and stages != ranks:
        raise Unsupported(f"pipeline_plan: {name} has a stage on each rank; try Interleaved1F1B")
    size = microbatches // max(1, microbatches // ranks)  # micro-batches that go round together
    if stages != ranks and microbatches % size:
        raise Unsupported(
            f"pipeline_plan: {microbatches} micro-batches can't go round {ranks} ranks in equal "
            f"groups; take {microbatches // ranks * ranks} or {-(-microbatches // ranks) * ranks}"
        )
    rows = []
    for rank in range(ranks):
        warm_up = (ranks - 1 - rank) * (2 if stages > ranks else 1) + (stages // ranks - 1) * size
        count = microbatches if name == "GPipe" else warm_up
        rows.append(_row(rank, range(rank, stages, ranks), microbatches, size, count))
    return PipelinePlan(str(name), tuple(rows))


def _row(
    rank: int, mine: Sequence[int], microbatches: int, size: int, warm_up: int
) -> tuple[Action, ...]:
    """Some forwards, then forwards and backwards in turn, then the remaining backwards.
    Groups of ``size`` micro-batches pass all of the rank's stages, one group after the other."""
    groups = [range(i, min(i + size, microbatches)) for i in range(0, microbatches, size)]
    forward = [Action(stage, "F", m) for group in groups for stage in mine for m in group]
    backward = [Action(stage, "B", m) for group in groups for stage in mine[::-1] for m in group]
    row, warm_up = forward[:warm_up], min(warm_up, len(forward))
    for pair in zip(forward[warm_up:], backward, strict=False):
        row += pair
    return tuple(row + backward[len(forward) - warm_up :])


@dataclass(frozen=True)
class PipelinePlan:
    """``actions[rank]``: the actions of each rank, in order. Every plan is complete and cannot
    deadlock."""

    name: str
    actions: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        self._check_complete()
        self.price()

    @cached_property
    def rank_of(self) -> dict[int, int]:
        """The rank of each stage."""
        return {action.stage: rank for rank, row in enumerate(self.actions) for action in row}

    @property
    def stages(self) -> int:
        return len(self.rank_of)

    @cached_property
    def microbatches(self) -> int:
        return 1 + max(action.microbatch for row in self.actions for action in row)

    @cached_property
    def _all(self) -> frozenset[Action]:
        return frozenset(action for row in self.actions for action in row)

    def needs(self, action: Action) -> list[Action]:
        """The actions that must end before this one begins, besides earlier ones of its rank."""
        stage, kind, m = action
        if kind == "F":
            return [Action(stage - 1, "F", m)] if stage > 0 else []
        if kind == "W":
            return [Action(stage, "I", m)]
        after = Action(stage + 1, "B" if Action(stage + 1, "B", m) in self._all else "I", m)
        return [Action(stage, "F", m)] + ([after] if stage + 1 < self.stages else [])

    def price(
        self,
        forward: float | Sequence[float] = 1.0,
        backward: float | Sequence[float] = 2.0,
        weight: float = 0.5,
        link: float = 0.0,
    ) -> Price:
        """The times of all passes. ``forward``, ``backward``: the time of a pass, or one per stage;
        ``weight``: the share of W in a backward of two parts; ``link``: the time of a message
        between two ranks, which compute meanwhile."""
        times = forward, backward, weight, link
        return pipeline.price(self.name, self.actions, self.needs, *times)

    def live(self) -> list[int]:
        """For each rank, the most micro-batches whose activations it holds, counted per stage."""
        return [pipeline.live(row) for row in self.actions]

    def __repr__(self) -> str:
        return (
            f"{self.name}: {self.stages} stages on {len(self.actions)} ranks, "
            f"{self.microbatches} micro-batches, bubble {self.price().bubble:.1%}, "
            f"at most {max(self.live())} live\n{self.price().draw()}"
        )

    # ---- torch's format --------------------------------------------------------------------------

    def to_csv(self) -> str:
        """The form of torch's ``_load_csv``: a line for each rank, a cell for each action."""
        return "".join(",".join(map(str, row)) + "\n" for row in self.actions)

    @classmethod
    def from_csv(cls, text: str, name: str = "csv") -> PipelinePlan:
        """Reads a file of torch's ``_dump_csv(..., format="compute_only")``. Passes that torch
        overlaps become consecutive."""
        rows = []
        for line in text.splitlines():
            row: list[Action] = []
            for cell in filter(None, map(str.strip, line.split(","))):
                both = _OVERLAPPED.fullmatch(cell)
                for one in both[1].split(";") if both else [cell]:
                    if (action := Action.of(one)) is None:
                        raise Unsupported(
                            f"pipeline_plan: {one!r} is not a pass such as 0F3; messages are not "
                            'part of a plan, so write it with format="compute_only"'
                        )
                    row.append(action)
            rows.append(tuple(row))
        return cls(name, tuple(rows))

    # ---- what can be wrong -----------------------------------------------------------------------

    def _check_complete(self) -> None:
        placed, kinds = self.rank_of, defaultdict(list)
        if sorted(placed) != list(range(len(placed))) or not placed:
            raise Unsupported(f"{self.name}: stages are numbered from 0, and not {sorted(placed)}")
        for rank, row in enumerate(self.actions):
            for stage, kind, m in row:
                kinds[stage, m].append(kind)
                if (other := placed[stage]) != rank:
                    raise Unsupported(f"{self.name}: stage {stage} is on ranks {rank} and {other}")
        for stage, m in product(range(self.stages), range(self.microbatches)):
            found = sorted(kinds[stage, m])
            if found not in (["B", "F"], ["F", "I", "W"]):
                raise Unsupported(
                    f"{self.name}: stage {stage} has {' '.join(found) or 'nothing'} of "
                    f"micro-batch {m}; it needs F and B, or F, I and W"
                )
