"""Pictures of docs/learn of models, matrices, sequences and states that ranks have in parts."""

from __future__ import annotations

from typing import Any

import numpy as np
from svg import BLUE, GREEN, GREY, INK, PALE, RANKS, YELLOW, Picture

from dpcore.parallel.attention import zigzag
from dpcore.parallel.pipeline_plans import pipeline_plan
from dpcore.reference.element_wise import adamw
from dpcore.reference.zero import Zero


def stages() -> Picture:
    """The passes of two plans, with a backward that takes twice as long as a forward."""
    drawn = Picture(720, 330)
    left, scale, height = 80, 17.0, 26
    for number, name in enumerate(("GPipe", "1F1B")):
        top = 36 + 156 * number
        plan = pipeline_plan(name, stages=4, microbatches=8)
        price = plan.price(forward=1, backward=2)
        drawn.text(left, top - 10, f"{name}: bubble {price.bubble:.0%}, "
                   f"rank 0 keeps {plan.live()[0]} micro-batches")  # fmt: skip
        for rank, spans in enumerate(price.spans):
            y = top + 31 * rank
            drawn.text(left - 12, y + 18, f"rank {rank}", "end", GREY, 12)
            drawn.box(left, y, scale * price.seconds, height, PALE)
            for action, begin, end in spans:
                ink = GREEN if action.kind == "F" else BLUE
                drawn.box(left + scale * begin, y, scale * (end - begin), height, ink,
                          str(action.microbatch), stroke="white")  # fmt: skip
    return drawn


def ring() -> Picture:
    """Which rank computes which square of the scores of a causal attention."""
    drawn = Picture(720, 300)
    ranks, chunks, side = 4, 8, 26
    turns = [range(2 * rank, 2 * rank + 2) for rank in range(ranks)]
    zigzags = [zigzag(chunks, ranks, rank).tolist() for rank in range(ranks)]
    for left, title, parts in ((110, "in turn", turns), (440, "zigzag", zigzags)):
        drawn.text(left + 104, 24, title, "middle")
        for rank, part in enumerate(parts):
            for query in part:
                drawn.text(left - 12, 58 + side * query, f"rank {rank}", "end", RANKS[rank], 12)
                for key in range(chunks):
                    ink = RANKS[rank] if key <= query else PALE
                    drawn.box(left + side * key, 40 + side * query, side, side, ink,
                              stroke="white")  # fmt: skip
        drawn.text(left + 104, 272, "keys", "middle", GREY, 12)
        busiest = max(sum(query + 1 for query in part) for part in parts)
        drawn.text(left + 104, 292, f"busiest rank: {busiest} of 36 squares", "middle", size=12)
    return drawn


def matrices() -> Picture:
    """Columns of the first matrix, rows of the second, and the one sum."""
    drawn = Picture(720, 256)
    ranks, side = 4, 34
    middle = 128
    drawn.box(24, middle - 45, 60, 90, PALE, "x")
    drawn.text(54, middle + 68, "whole,", "middle", GREY, 12)
    drawn.text(54, middle + 84, "on every rank", "middle", GREY, 12)
    for rank in range(ranks):
        left = 112 + side * rank
        drawn.box(left, middle - 30, side, 60, RANKS[rank], str(rank), stroke="white")
        drawn.box(left + 170, middle - 45, side, 90, RANKS[rank], str(rank), stroke="white")
        top = middle + side * (rank - ranks / 2)
        drawn.box(452, top, 60, side, RANKS[rank], str(rank), stroke="white")
        drawn.box(552, top + 3, 46, side - 6, RANKS[rank], f"term {rank}")
        drawn.arrow(600, top + side / 2, 632, middle + (rank - 1.5) * 8, RANKS[rank])
    drawn.box(636, middle - 45, 60, 90, PALE, "y")
    drawn.text(180, 34, "first matrix,", "middle")
    drawn.text(180, 50, "by columns", "middle")
    drawn.text(350, 34, "features:", "middle")
    drawn.text(350, 50, "nothing to send", "middle")
    drawn.text(482, 34, "second,", "middle")
    drawn.text(482, 50, "by rows", "middle")
    drawn.text(618, 34, "all-reduce", "middle", INK)
    for x, sign in ((98, "·"), (265, "="), (435, "·"), (532, "=")):
        drawn.text(x, middle + 6, sign, "middle", GREY, 18)
    drawn.text(360, 240, "Backward goes from right to left: there, the all-reduce is of the "
               "gradient of x.", "middle", GREY, 13)  # fmt: skip
    return drawn


class _Alone:
    """A rank whose peers have the same numbers: memory is that of four ranks."""

    rank, world_size = 0, 4

    def all_reduce(self, tensor: Any, op: str) -> None: ...

    def reduce_scatter(self, part: Any, whole: Any, op: str) -> None:
        part[:] = whole[0]

    def all_gather(self, whole: Any, part: Any) -> None:
        whole[:] = part


class _Layer:
    def forward(self, weights: Any, x: Any) -> Any:
        return np.tanh(x @ weights)

    def backward(self, weights: Any, x: Any, dy: Any) -> Any:
        inner = dy * (1 - np.tanh(x @ weights) ** 2)
        return inner @ weights.T, x.T @ inner


class _Watched(Zero):
    """Notes what is held at each moment."""

    def look(self) -> None:
        self.peak = dict.fromkeys(self.peak, 0)
        super().look()
        vars(self).setdefault("seen", []).append(list(self.peak.values()))


def held() -> Picture:
    """What a rank holds in the course of its second step: eight layers, forward, backward,
    update."""
    drawn = Picture(720, 290)
    layers, inks, height, width = 8, (BLUE, GREEN, YELLOW), 176, 160
    for stage in range(4):
        left, bottom = 16 + 176 * stage, 216
        zero: Any = _Watched(stage, [_Layer()] * layers, [np.eye(16)] * layers, _Alone(), adamw,
                             lr=0.01)  # fmt: skip
        for _ in range(2):
            zero.step(np.ones((2, 16)), lambda y: y)
        seen = zero.seen[len(zero.seen) // 2 :]
        whole = 4 * layers * 16 * 16 * 8  # bytes of parameters, gradients and Adam's two states
        each = width / len(seen)
        drawn.box(left, bottom - height, width, height, PALE)
        for moment, parts in enumerate(seen):
            top = float(bottom)
            for part, ink in zip((parts[2], parts[0], parts[1]), (inks[2], *inks[:2]), strict=True):
                size = height * part / whole
                top -= size
                drawn.box(left + each * moment, top, each + 0.3, size, ink)
        most = max(map(sum, seen)) / whole
        drawn.text(left + width / 2, 28, f"ZeRO-{stage}: {most:.0%}", "middle")
        for at in (1 / 3, 2 / 3):
            drawn.line([(left + width * at, bottom - height), (left + width * at, bottom)],
                       "white", 1)  # fmt: skip
        for at, name in ((1 / 6, "forward"), (1 / 2, "backward"), (5 / 6, "update")):
            drawn.text(left + width * at, bottom + 16, name, "middle", GREY, 10)
    for number, (name, ink) in enumerate(
        (("gradients", GREEN), ("parameters", BLUE), ("optimizer's state", YELLOW))
    ):
        drawn.box(150 + 150 * number, 256, 14, 14, ink)
        drawn.text(170 + 150 * number, 268, name, size=12)
    return drawn
