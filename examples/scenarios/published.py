"""Two published results as scenarios: what would have to be true for them to come out?

    python examples/scenarios/published.py                two tables
    python examples/scenarios/published.py --plot FILE    and a picture of them

Nothing here was measured by dpcore, and all of it is extrapolated: more ranks and other processors
than any run that was compared with a prediction. What the sources say is in README.md, what they do
not say is assumed below, and the tables show how much each assumption matters.
"""

import argparse
from collections.abc import Sequence
from typing import Any

from dpcore.base.link import parse_speed
from dpcore.tools.simulate import Gradients, predict

RESNET_50 = 25_600_000 * 4  # bytes of gradients
LINKS = ("10gbit,20us", "10gbit,200us")
BERT_BASE = 110_000_000 * 4


def model(nbytes: int, seconds: float, layers: int = 50) -> Gradients:
    """Equal layers; forward takes a third of the step's computing."""
    ready = [2 / 3 * seconds * (layer + 1) / layers for layer in range(layers)]
    return Gradients(
        [nbytes // layers] * layers, [0] * layers, [seconds / 3], [2 / 3 * seconds], [ready]
    )


DEAR = (
    ("ResNet-50", RESNET_50, (0.05, 0.1, 0.2, 0.4)),
    ("BERT-Base", BERT_BASE, (0.2, 0.4, 0.8, 1.6)),
)


def dear(models: Sequence[Any] = DEAR) -> list[Any]:
    """64 GPUs on 10 Gbit/s: how much longer do others take than DeAR? By ring, since then each host
    sends and receives for one of its GPUs at a time, and all share the card anyway."""
    rows = []
    for name, nbytes, times in models:
        for seconds in times:
            work = model(nbytes, seconds).on(64)
            for words in LINKS:
                link = parse_speed(words)
                took = {
                    schedule: predict(work, link, schedule, 25, "ring").step_ms
                    for schedule in ("dear", "bucketed", "sequential")
                }
                gains = [took[other] / took["dear"] - 1 for other in ("bucketed", "sequential")]
                rows.append((name, seconds, words, took["dear"], *gains))
    return rows


BOOK = ((8, "40gbit,5us"), (8, "80gbit,5us"), (2, "1gbit,50us"), (2, "10gbit,20us"))


def book(
    cases: Sequence[tuple[int, str]] = BOOK,
    times: Sequence[float] = (0.025, 0.05, 0.1, 0.2, 0.4),
) -> list[Any]:
    """How many times as fast as one GPU are 8 that share a host, and two machines?"""
    rows = []
    for world, words in cases:
        for seconds in times:
            work = model(RESNET_50, seconds)
            step_ms = predict(work.on(world), parse_speed(words), "bucketed", 25).step_ms
            rows.append((world, words, seconds, world * seconds * 1e3 / step_ms))
    return rows


def draw(path: str, book_rows: Sequence[Any], dear_rows: Sequence[Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for world, words in dict.fromkeys(row[:2] for row in book_rows):
        points = [(row[2] * 1e3, row[3] / world) for row in book_rows if row[:2] == (world, words)]
        left.plot(*zip(*points, strict=True), marker="o", label=f"{world} GPUs, {words}")
    left.axhline(6.5 / 8, linestyle=":", color="gray", label="6.5 of 8")
    left.axhline(1.7 / 2, linestyle="--", color="gray", label="1.7 of 2")
    left.set(title="ResNet-50", ylabel="share of the ideal speed", ylim=(0, 1.05))
    for name, words in dict.fromkeys((row[0], row[2]) for row in dear_rows):
        rows = [row for row in dear_rows if (row[0], row[2]) == (name, words)]
        points = [(row[1] * 1e3, row[4] * 100) for row in rows]
        right.plot(*zip(*points, strict=True), marker="o", label=f"{name}, {words}")
    right.set(title="64 GPUs by ring", ylabel="bucketed takes longer than dear by, %")
    for axes in (left, right):
        axes.set(xlabel="computing of a step, ms", xscale="log")
        axes.xaxis.set_major_locator(ticker.FixedLocator([25, 50, 100, 200, 400, 800, 1600]))
        axes.xaxis.set_major_formatter(ticker.ScalarFormatter())
        axes.xaxis.set_minor_locator(ticker.NullLocator())
        axes.legend(fontsize="x-small")
    figure.suptitle("Predicted and extrapolated: no run like these was compared", fontsize="medium")
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plot", metavar="FILE")
    options = parser.parse_args()
    book_rows, dear_rows = book(), dear()
    print("ResNet-50, extrapolated. The book: 8 GPUs 6.5 times, two machines 1.7 times")
    print("GPUs  link          computing  times as fast")
    for world, words, seconds, times in book_rows:
        print(f"{world:>4}  {words:12}  {seconds * 1e3:>6.0f} ms  {times:>13.2f}")
    print("\n64 GPUs by ring, extrapolated. DeAR's paper: others take up to 83% longer")
    print("model      computing  link              dear  bucketed  sequential")
    for name, seconds, words, ms, bucketed, sequential in dear_rows:
        print(
            f"{name:9}  {seconds * 1e3:>6.0f} ms  {words:13}  {ms:>4.0f} ms  {bucketed:>+8.0%}  "
            f"{sequential:>+10.0%}"
        )
    if options.plot:
        draw(options.plot, book_rows, dear_rows)


if __name__ == "__main__":
    main()
