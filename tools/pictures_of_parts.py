"""Pictures of docs/learn of models and sequences that ranks have in parts."""

from __future__ import annotations

from svg import BLUE, GREEN, GREY, PALE, RANKS, Picture

from dpcore.parallel.attention import zigzag
from dpcore.parallel.pipeline_plans import pipeline_plan


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
