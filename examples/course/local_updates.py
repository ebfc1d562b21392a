"""Local SGD and federated averaging: accuracy against bytes, also with skewed shards.

    python examples/course/local_updates.py

Four ranks train by themselves and average their weights now and then, which sends fewer bytes than
averaging gradients in each step. Federated averaging is the same with whole epochs in between. It
costs little when all ranks have alike data. When each has only some of the ten digits, as
hospitals or telephones do, they drift apart while they are alone: that is what federated learning
fights with.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from data import Part, accuracy, batches, digits, loss_of, mlp, traffic
from figures import COLOURS, axes, finish, in_per_cent, options, over, progress, spread

import dpcore as dp

RANKS, EACH, RATE = 4, 16, 0.05
EPOCH = 1280 // RANKS // EACH  # steps


def shard(rank: int, is_skewed: bool, seed: int) -> Part:
    """A quarter of the training part: of all digits, or of those that come next when sorted."""
    train = digits().train
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))
    if is_skewed:
        order = order[train.y[order].argsort(stable=True)]
    mine = order.chunk(RANKS)[rank]
    return Part(train.x[mine], train.y[mine])


def train(
    comm: dp.Communicator, sync_every: int, is_skewed: bool, seed: int, epochs: int
) -> tuple[float, float]:
    """Accuracy on the test part, and the megabytes that a rank has moved to or from others.
    ``sync_every`` 0: gradients in every step."""
    module: Any = mlp(seed, 64, 64, 10)
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE, momentum=0.9)
    block: AbstractContextManager[Any] = nullcontext()
    begin = traffic(comm)
    model = module
    if sync_every:
        block = dp.LocalSGD(module, optimizer, sync_every, comm=comm)
    else:
        model = dp.DataParallel(module, comm=comm, schedule="sequential")
    mine = shard(comm.rank, is_skewed, seed)
    with block:
        for epoch in range(epochs):
            for part in batches(mine, EACH, 1000 * seed + epoch):
                optimizer.zero_grad()
                loss_of(model, part).backward()
                optimizer.step()
    return accuracy(module, digits().test), (traffic(comm) - begin) / 1e6


def main() -> None:
    chosen = options(__doc__, "local_updates")
    torch.set_num_threads(1)
    epochs = 5 if chosen.quick else 10
    ways = {
        "gradients, each step": 0,
        "weights, every 4 steps": 4,
        "weights, each epoch": EPOCH,
        "weights, every 5 epochs": 5 * EPOCH,
    }
    seeds = [0] if chosen.quick else [0, 1, 2, 3, 4]
    shards = {"alike": False, "some of the digits each": True}
    results = {}
    with progress(len(shards) * len(ways) * len(seeds), f"{RANKS} ranks, {epochs} epochs") as done:
        for name, is_skewed in shards.items():
            for way, sync_every in ways.items():
                runs = []
                for seed in seeds:
                    arguments = (train, RANKS, sync_every, is_skewed, seed, epochs)
                    runs.append(dp.spawn(*arguments, mode="threads")[0])
                    done()
                results[name, way] = spread([run[0] for run in runs]), runs[0][1]
    rows = [
        {
            "shards": name,
            "what is averaged": way,
            "accuracy, %": found.text(),
            "MB moved by a rank": f"{megabytes:.2f}",
        }
        for (name, way), (found, megabytes) in results.items()
    ]
    figure, (plot,) = axes(f"digits after {epochs} epochs on {RANKS} ranks")
    for number, name in enumerate(shards):
        found = [results[name, way] for way in ways]
        plot.errorbar(
            [megabytes for _, megabytes in found],
            [s.mean for s, _ in found],
            [[s.mean - s.low for s, _ in found], [s.high - s.mean for s, _ in found]],
            marker="o",
            capsize=3,
            color=COLOURS[number],
            label=f"shards: {name}",
        )
    for way in ways:
        _, megabytes = results["alike", way]
        plot.annotate(
            way.replace(", ", ",\n"),
            (megabytes, 0.97),
            xycoords=("data", "axes fraction"),
            fontsize=8,
            ha="center",
            va="top",
            color="dimgrey",
        )
    plot.set(
        xscale="log",
        xlabel="MB that a rank has moved to or from others",
        ylabel="accuracy on the test part, %",
    )
    plot.margins(0.15, 0.25)
    in_per_cent(plot)
    plot.legend(frameon=False, loc="lower right")
    far = list(ways)[-1]
    alike, skewed = (results[name, far][0] for name in shards)
    ratio = results["alike", next(iter(ways))][1] / results["alike", far][1]
    said = [
        f"Weights every 5 epochs move {ratio:.0f} times fewer bytes than gradients in each step: "
        f"{alike.text()} % with shards that are alike, {skewed.text()} % with skewed ones.",
        f"{over(len(seeds), 'seeds').capitalize()}.",
    ]
    facts = {
        "results": [
            {"shards": name, "way": way, "accuracy": s._asdict(), "megabytes": megabytes}
            for (name, way), (s, megabytes) in results.items()
        ]
    }
    finish(chosen, rows, figure, facts, said)


if __name__ == "__main__":
    main()
