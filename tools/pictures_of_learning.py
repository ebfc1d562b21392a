"""Pictures of the pages of docs/learn about training on more ranks."""

from __future__ import annotations

import math
import random

from svg import BLUE, GREEN, GREY, INK, PALE, RANKS, RED, YELLOW, Picture, Plot


def batch_size(printed: list[list[float]]) -> Picture:
    """``printed``: batch, steps and samples of each line."""
    drawn = Picture(720, 300)
    sizes = {batch: f"{batch:g}" for batch, *_ in printed}
    plot = Plot(drawn, (80, 40, 240, 190), (4, 512), (20, 1000))
    plot.curve([(batch, steps) for batch, steps, _ in printed], BLUE)
    first = printed[0]
    ideal = [(batch, first[1] * first[0] / batch) for batch, *_ in printed]
    plot.curve([point for point in ideal if point[1] > 22], GREY, dash="5 4")
    plot.ticks(sizes, {v: f"{v}" for v in (20, 50, 100, 200, 500, 1000)}, "batch", "steps")
    plot = Plot(drawn, (440, 40, 240, 190), (4, 512), (2000, 20000))
    plot.curve([(batch, samples) for batch, _, samples in printed], RED)
    thousands = {2000: "2000", 5000: "5000", 10000: "10000", 20000: "20000"}
    plot.ticks(sizes, thousands, "batch", "samples")
    return drawn


def noise() -> Picture:
    """Gradients of batches around the true one."""
    drawn, dice = Picture(720, 250), random.Random(3)
    for number, (title, spread) in enumerate(
        (("batches of 8", 62.0), ("batches of 32", 31.0), ("batches of 128", 15.5))
    ):
        x, y = 50 + 235 * number, 190
        drawn.text(x + 75, 30, title, "middle")
        for _ in range(14):
            drawn.arrow(x, y, x + 120 + dice.gauss(0, spread) * 0.7, y - 70
                        + dice.gauss(0, spread) * 0.7, "#b9cfdd", 1.2)  # fmt: skip
        drawn.arrow(x, y, x + 120, y - 70, RED, 2.6)
    drawn.text(360, 236, "red: the gradient of all samples", "middle", RED, 13)
    return drawn


def accuracy(printed: list[list[float]]) -> Picture:
    """``printed``: ranks, and the loss with the same rate, the square-root and the linear rule."""
    drawn = Picture(720, 310)
    plot = Plot(drawn, (80, 40, 430, 200), (1, 32), (0.3, 5))
    for column, (name, ink) in enumerate(
        (("the same rate", RED), ("square-root rule", YELLOW), ("linear rule", BLUE)), 1
    ):
        plot.curve([(row[0], row[column]) for row in printed], ink, name)
    ranks = {row[0]: f"{row[0]:g}" for row in printed}
    plot.ticks(ranks, {v: f"{v:g}" for v in (0.3, 0.5, 1, 2, 5)}, "ranks, 16 samples each",
               "loss after five epochs")  # fmt: skip
    return drawn


def batch_norm() -> Picture:
    """Eight values, two on each of four ranks, and what each rank takes for zero and one."""
    drawn = Picture(720, 230)
    values = [(-1.2, 0.4), (0.9, 1.4), (-0.3, -0.7), (1.8, 0.1)]

    def place(value: float) -> float:
        return 380 + 130 * value

    for rank, pair in enumerate(values):
        y, middle = 40 + 34 * rank, sum(pair) / 2
        drawn.text(30, y + 5, f"rank {rank}", ink=RANKS[rank])
        drawn.line([(150, y), (640, y)], PALE, 1)
        half = abs(pair[0] - pair[1]) / 2
        drawn.line([(place(middle - half), y), (place(middle + half), y)], RANKS[rank], 5)
        drawn.line([(place(middle), y - 9), (place(middle), y + 9)], RANKS[rank], 2)
        for value in pair:
            drawn.dot(place(value), y, INK, 4)
    everything = [value for pair in values for value in pair]
    middle = sum(everything) / 8
    half = math.sqrt(sum((value - middle) ** 2 for value in everything) / 8)
    drawn.text(30, 193, "all ranks", ink=RED)
    drawn.line([(150, 188), (640, 188)], PALE, 1)
    drawn.line([(place(middle - half), 188), (place(middle + half), 188)], RED, 5)
    drawn.line([(place(middle), 179), (place(middle), 197)], RED, 2)
    for value in everything:
        drawn.dot(place(value), 188, INK, 4)
    drawn.text(
        380, 220, "bars: mean and deviation that the layer normalises by", "middle", GREY, 12
    )
    return drawn


def sampler() -> Picture:
    """Ten samples on four ranks, in two epochs."""
    drawn = Picture(720, 190)
    for epoch, order in enumerate(
        ([4, 1, 7, 5, 3, 9, 0, 8, 6, 2, 4, 1], [5, 6, 1, 2, 0, 8, 9, 3, 7, 4, 5, 6])
    ):
        y = 34 + 60 * epoch
        drawn.text(20, y + 22, f"epoch {epoch}")
        for place, sample in enumerate(order):
            again = place >= 10
            drawn.box(100 + 46 * place + 14 * again, y, 40, 34, RANKS[place % 4], str(sample),
                      opacity="0.55" if again else "1")  # fmt: skip
    for rank in range(4):
        drawn.box(100 + 110 * rank, 158, 14, 14, RANKS[rank])
        drawn.text(120 + 110 * rank, 170, f"rank {rank}", size=12)
    drawn.text(575, 170, "used twice", ink=GREY, size=12)
    return drawn


def strategies(printed: list[list[float]]) -> Picture:
    """``printed``: gigabytes of parameters, gradients and optimizer state of each line."""
    drawn = Picture(720, 240)
    rows = [row[-4:-1] for row in printed[:4]]
    names = ("data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3, FSDP")
    scale = 500 / sum(rows[0])
    for number, (name, parts) in enumerate(zip(names, rows, strict=True)):
        y, x = 24 + 44 * number, 150.0
        drawn.text(138, y + 20, name, "end")
        for part, ink in zip(parts, (BLUE, GREEN, YELLOW), strict=True):
            drawn.box(x, y, scale * part, 30, ink, f"{part:g}" if scale * part > 24 else "")
            x += scale * part
        drawn.text(x + 6, y + 20, f"{sum(parts):g} GB", size=12)
    for number, (name, ink) in enumerate(
        (("parameters", BLUE), ("gradients", GREEN), ("optimizer's state", YELLOW))
    ):
        drawn.box(150 + 130 * number, 208, 14, 14, ink)
        drawn.text(170 + 130 * number, 220, name, size=12)
    return drawn


def machines() -> Picture:
    drawn = Picture(720, 220)
    for host in range(2):
        left = 30 + 390 * host
        drawn.box(left, 30, 270, 130, "none", stroke=GREY, rx="8")
        drawn.text(left + 12, 52, f"host {host}", ink=GREY)
        drawn.box(left + 20, 108, 230, 36, PALE, "memory: 10 GB/s and more")
        for rank in range(4):
            drawn.box(left + 24 + 58 * rank, 62, 46, 30, RANKS[rank], str(4 * host + rank))
            drawn.line([(left + 47 + 58 * rank, 92), (left + 47 + 58 * rank, 108)], GREY, 2)
    drawn.line([(280, 126), (440, 126)], RED, 3)
    drawn.text(360, 118, "0.1 to 50 GB/s", "middle", RED, 12)
    drawn.text(360, 190, "added up within the host, sent over the network once per host,",
               "middle", size=13)  # fmt: skip
    drawn.text(360, 208, "handed out within the host", "middle", size=13)
    return drawn
