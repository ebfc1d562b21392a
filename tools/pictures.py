"""Draws the pictures of docs/learn from what they are about (lists of moves, the gradients that
their commands simulate, what their code prints) and that of the README from its figures.

python tools/pictures.py            # says which are not up to date
python tools/pictures.py --write    # and draws them
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import pictures_of_learning  # noqa: E402
import pictures_of_parts  # noqa: E402
import pictures_of_results  # noqa: E402
import pictures_of_steps  # noqa: E402
from svg import BLUE, GREEN, GREY, INK, PALE, RANKS, RED, YELLOW, Picture, Plot  # noqa: E402

from benchmarks.harness.figures import load  # noqa: E402
from dpcore.reference import make_schedule  # noqa: E402

FOLDER = ROOT / "docs" / "images"


def mean() -> Picture:
    drawn = Picture(720, 210)
    for rank in range(2):
        y = 30 + 100 * rank
        drawn.text(20, y + 30, f"rank {rank}")
        drawn.box(90, y, 130, 50, RANKS[rank], "half of the batch")
        drawn.arrow(225, y + 25, 275, y + 25, GREY)
        drawn.box(280, y, 110, 50, RANKS[rank], f"gradient {'ab'[rank]}")
        drawn.arrow(395, y + 25, 445, 105, GREY)
        drawn.arrow(555, 105, 605, y + 25, GREY)
        drawn.box(610, y, 90, 50, RANKS[rank], "same step")
    drawn.box(450, 80, 100, 50, PALE, "(a + b) / 2")
    return drawn


def moves() -> Picture:
    """Lines lead from sender to receiver, a row for each step."""
    drawn = Picture(720, 330)
    for number, name in enumerate(("one_shot", "two_shot", "ring")):
        left, plan = 40 + 235 * number, make_schedule(name, "all_reduce", world=4)
        steps = 1 + max(move.step for move in plan.moves)
        drawn.text(left + 85, 26, f"{name}: {steps} step{'s' * (steps > 1)}", "middle")
        for rank in range(4):
            drawn.text(left + 56 * rank, 50, str(rank), "middle", RANKS[rank])
        for step in range(steps):
            top = 60 + 43 * step
            for rank in range(4):
                drawn.line([(left + 56 * rank - 12, top), (left + 56 * rank + 12, top)], PALE, 3)
            pairs = {(move.src, move.dst) for move in plan.moves if move.step == step}
            for src, dst in sorted(pairs):
                drawn.arrow(left + 56 * src, top + 2, left + 56 * dst, top + 39, RANKS[src], 1.4)
    return drawn


def two_costs() -> Picture:
    drawn = Picture(720, 330)
    plot = Plot(drawn, (90, 40, 430, 220), (8, 64 << 20), (40e-6, 8))
    latency, bandwidth, world = 50e-6, 125e6, 8
    sizes = [float(8 << 3 * power) for power in range(8)]
    one = [(size, latency + (world - 1) * size / bandwidth) for size in sizes]
    steps = 2 * (world - 1)
    ring = [(size, steps * (latency + size / world / bandwidth)) for size in sizes]
    plot.curve(one, RED, "one-shot: 1 step, 7 S bytes")
    plot.curve(ring, BLUE, "ring: 14 steps, 1.75 S bytes")
    names = ("8 B", "512 B", "32 KiB", "2 MiB")
    plot.ticks(
        dict(zip(sizes[::2], names, strict=True)),
        {1e-4: "0.1 ms", 1e-3: "1 ms", 1e-2: "10 ms", 0.1: "0.1 s", 1: "1 s"},
        "bytes S of each of 8 ranks, over 1 Gbit/s and 50 us", "time",
    )  # fmt: skip
    return drawn


def orders() -> Picture:
    """In which order the ranks are added in each chunk, read from the moves of the ring."""
    drawn = Picture(720, 210)
    plan = make_schedule("ring", "all_reduce", world=4)
    for column, (title, left) in enumerate((("ring", 120), ("ordered", 430))):
        drawn.text(left + 110, 30, title, "middle")
        for chunk in range(4):
            order = [0, 1, 2, 3]
            if not column:
                added = sorted(
                    (move.step, move.src, move.dst)
                    for move in plan.moves
                    if move.chunk == chunk and move.reduce
                )
                order = [added[0][1], *(dst for _, _, dst in added)]
            if not column:
                drawn.text(20, 68 + 36 * chunk, f"chunk {chunk}")
            for place, rank in enumerate(order):
                x = left + 58 * place
                drawn.box(x, 50 + 36 * chunk, 42, 26, RANKS[rank], str(rank))
                if place < 3:
                    drawn.text(x + 50, 68 + 36 * chunk, "+", "middle")
    return drawn


def death() -> Picture:
    drawn = Picture(720, 170)
    drawn.text(20, 60, "rank 0")
    drawn.text(20, 120, "rank 1")
    drawn.box(90, 42, 120, 28, BLUE, "computes")
    drawn.box(210, 42, 130, 28, RED, "waits")
    drawn.box(90, 102, 180, 28, BLUE, "computes")
    drawn.text(280, 122, "killed", ink=RED)
    drawn.arrow(275, 102, 338, 74, INK)
    drawn.text(350, 61, "PeerLost: rank 1, all_reduce 0")
    drawn.line([(345, 85), (620, 85)], GREY, 1.5, "5 4")
    drawn.text(628, 90, "timeout, 30 s", ink=GREY, size=12)
    drawn.text(350, 108, "milliseconds, by the kernel's word", ink=GREY, size=12)
    return drawn


def no_error() -> Picture:
    drawn = Picture(720, 220)
    for column, (title, averages) in enumerate((("model(x)", True), ("model.module(x)", False))):
        left = 20 + 360 * column
        drawn.text(left + 170, 26, title, "middle")
        for rank in range(2):
            y = 50 + 100 * rank
            drawn.text(left, y + 30, f"rank {rank}")
            drawn.box(left + 60, y, 90, 50, RANKS[rank], f"gradient {'ab'[rank]}")
            drawn.box(left + 240, y, 90, 50, RANKS[rank], "step")
            if averages:
                middle = 108 + 34 * rank
                drawn.arrow(left + 155, y + 25, left + 180, middle, GREY)
                drawn.arrow(left + 212, middle, left + 237, y + 25, GREY)
            else:
                drawn.arrow(left + 155, y + 25, left + 237, y + 25, RED)
        words = ("(a + b) / 2", INK) if averages else ("nothing is averaged", RED)
        drawn.text(left + 195, 130, words[0], "middle", words[1])
    return drawn


def born() -> Picture:
    drawn = Picture(720, 220)
    for row, (title, copies) in enumerate((("copied", True), ("born", False))):
        y = 30 + 100 * row
        drawn.text(20, y + 30, title)
        drawn.box(100, y, 110, 50, PALE, "backward")
        drawn.box(560, y, 110, 50, RANKS[1], "peers")
        if copies:
            drawn.box(255, y, 110, 50, YELLOW, "new memory")
            drawn.arrow(215, y + 25, 252, y + 25, RED)
            drawn.arrow(370, y + 25, 402, y + 25, RED)
        else:
            drawn.arrow(215, y + 25, 402, y + 25, GREEN)
        drawn.box(405, y, 110, 50, RANKS[0], "its bucket")
        drawn.arrow(557, y + 25, 520, y + 25, GREY)
    drawn.text(310, 100, "found and zeroed by the kernel, then copied", "middle", RED, 13)
    return drawn


def compiled() -> Picture:
    """Backward of four layers, last layer first, and when each gradient is sent."""
    drawn = Picture(720, 284)
    ways = (("eager", 120, True), ("compiled", 90, False), ("with operations", 90, True))
    for row, (title, width, leaves) in enumerate(ways):
        y = 30 + 82 * row
        drawn.text(10, y + 17, title)
        if title == "eager":
            for number in range(4):
                drawn.box(140 + width * number, y, width - 4, 26, RANKS[0], f"layer {4 - number}")
        else:
            drawn.box(140, y, 4 * width - 4, 26, RANKS[0], "one function: layers 4 to 1")
        for number in range(4):
            ready = 140 + width * (number + 1 if leaves else 4)
            begin = ready if leaves else ready + 50 * number
            drawn.box(
                begin, y + 32, 48, 22, GREEN if begin < 140 + 4 * width else RED, str(4 - number)
            )
    drawn.text(10, 274, "green: sent while backward computes; red: exposed", "start", INK, 13)
    return drawn


def survivors() -> Picture:
    """Three steps with the mean of four ranks, a death, and three steps with that of the others."""
    drawn = Picture(720, 230)
    for rank in range(4):
        y = 20 + 44 * rank
        drawn.text(20, y + 21, f"rank {rank}")
        for step in range(3 if rank == 1 else 6):
            x = 90 + 70 * step + 190 * (step > 2)
            drawn.box(x, y, 64, 30, RANKS[rank], f"step {step + 1}")
        if rank == 1:
            drawn.text(306, y + 21, "killed", ink=RED)
        else:
            drawn.box(306, y, 52, 30, RED, "cut")
            drawn.box(364, y, 110, 30, PALE, "shrink, agree")
    drawn.text(90, 215, "mean of 1, 2, 3, 4: 2.5", size=13)
    drawn.text(490, 215, "mean of 1, 3, 4: 2.67", size=13)
    return drawn


def printed(page: str) -> list[list[float]]:
    """The numbers in each line that the first code of a page prints."""
    (path,) = (ROOT / "docs" / "learn").glob(f"{page}-*.md")
    found = re.search(r"^```python\n(.*?)^```", path.read_text(encoding="utf-8"), re.M | re.S)
    assert found is not None
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(found[1], path.name, "exec"), {})
    return [
        [float(number) for number in re.findall(r"\d+(?:\.\d+)?", line)]
        for line in out.getvalue().splitlines()
    ]


def transformer() -> tuple[float, float, list[tuple[float, float]]]:
    """Forward, backward, and of each gradient the bytes and when it is there, in milliseconds."""
    text = (ROOT / "docs" / "learn" / "transformer.json").read_text(encoding="utf-8")
    found = json.loads(text)
    gradients = [(float(g["bytes"]), float(g["ready_ms"])) for g in found["gradients"]]
    return found["forward_ms"], found["backward_ms"], gradients


OF_LESSONS: dict[str, Callable[[], Picture]] = {
    "1-the-mean": mean,
    "2-moves": moves,
    "3-two-costs": two_costs,
    "4-per-gradient": lambda: pictures_of_steps.per_gradient(*transformer()),
    "5-buckets": lambda: pictures_of_steps.buckets(*transformer()),
    "6-exposed": lambda: pictures_of_steps.exposed(*transformer()),
    "7-the-same-bits": orders,
    "8-a-rank-dies": death,
    "9-across-steps": pictures_of_steps.across_steps,
    "10-batch-size": lambda: pictures_of_learning.batch_size(printed("10")),
    "11-noise": pictures_of_learning.noise,
    "12-accuracy": lambda: pictures_of_learning.accuracy(printed("12")),
    "13-batch-norm": pictures_of_learning.batch_norm,
    "14-a-script": pictures_of_learning.sampler,
    "15-strategies": lambda: pictures_of_learning.strategies(printed("15")),
    "16-several-machines": pictures_of_learning.machines,
    "17-a-model-in-stages": pictures_of_parts.stages,
    "18-a-sequence-in-a-ring": pictures_of_parts.ring,
    "19-two-matrices-one-sum": pictures_of_parts.matrices,
    "20-held-once": pictures_of_parts.held,
    "21-no-error": no_error,
    "22-where-a-gradient-lies": born,
    "23-a-compiled-backward": compiled,
    "24-survivors": survivors,
}
PICTURES = {f"learn/{name}": draw for name, draw in OF_LESSONS.items()} | {
    "first_screen": lambda: pictures_of_results.first_screen(load("first_screen")),
}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true")
    writes = parser.parse_args(arguments).write
    stale = 0
    for name, draw in PICTURES.items():
        path, text = FOLDER / f"{name}.svg", draw().svg()
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale += 1
        if writes:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        print(f"{path.relative_to(ROOT)} {'drawn' if writes else 'is not up to date'}")
    return int(bool(stale) and not writes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
