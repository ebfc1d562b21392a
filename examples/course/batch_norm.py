"""Batch norm over the samples of a rank, or of all ranks.

    python examples/course/batch_norm.py

Batch norm is the exception to "data parallel training is one process with the whole batch": each
rank normalises by the mean and variance of its own samples. With many samples per rank that hardly
matters; with two it does. SyncBatchNorm takes them over all ranks, and the result is that of one
process again. torch has it for GPUs only; under dpcore.DataParallel it trains on CPUs as well.

Eight ranks, as threads, train an MLP with batch norm on the digits.
"""

from __future__ import annotations

import torch
from data import Part, accuracy, batches, digits, loss_of, mlp
from figures import Spread, axes, finish, in_per_cent, line, numbers_on, options, progress, spread

import dpcore as dp

RANKS, EPOCHS, RATE = 8, 4, 0.05
SIZES = (64, 64, 64, 10)


def train(comm: dp.Communicator, each: int, synchronised: bool, seed: int, steps: int) -> float:
    """Accuracy of rank 0's model, whose running means and variances are everybody's."""
    module = mlp(seed, *SIZES, norm=True)
    if synchronised:
        module = torch.nn.SyncBatchNorm.convert_sync_batchnorm(module)
    model = dp.DataParallel(module, comm=comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE * (each * RANKS / 128) ** 0.5)
    step = 0
    while step < steps:
        for part in batches(digits().train, each * RANKS, 1000 * seed + step):
            mine = Part(*(tensor.chunk(RANKS)[comm.rank] for tensor in part))
            optimizer.zero_grad()
            loss_of(model, mine).backward()
            optimizer.step()
            step += 1
            if step == steps:
                break
    return accuracy(model.module, digits().test) if comm.rank == 0 else 0.0


def alone(each: int, seed: int, steps: int) -> float:
    """One process with the whole batch."""
    return dp.spawn(whole, 1, each, seed, steps, mode="threads")[0]


def whole(comm: dp.Communicator, each: int, seed: int, steps: int) -> float:
    model = mlp(seed, *SIZES, norm=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE * (each * RANKS / 128) ** 0.5)
    step = 0
    while step < steps:
        for part in batches(digits().train, each * RANKS, 1000 * seed + step):
            optimizer.zero_grad()
            loss_of(model, part).backward()
            optimizer.step()
            step += 1
            if step == steps:
                break
    return accuracy(model, digits().test)


def main() -> None:
    chosen = options(__doc__, "batch_norm")
    torch.set_num_threads(1)
    sizes = [2] if chosen.quick else [2, 4, 8, 16]
    seeds = [0, 1] if chosen.quick else [0, 1, 2, 3, 4]
    steps = 5 if chosen.quick else 100
    names = ("local batch norm", "SyncBatchNorm", "one process")
    results: dict[str, list[Spread]] = {name: [] for name in names}
    with progress(3 * len(sizes) * len(seeds), f"{RANKS} ranks, {steps} steps") as done:
        for each in sizes:
            found: dict[str, list[float]] = {name: [] for name in names}
            for seed in seeds:
                for name in names:
                    if name == "one process":
                        found[name].append(alone(each, seed, steps))
                    else:
                        is_sync = name == "SyncBatchNorm"
                        arguments = (train, RANKS, each, is_sync, seed, steps)
                        found[name].append(dp.spawn(*arguments, mode="threads")[0])
                    done()
            for name in names:
                results[name].append(spread(found[name]))
    rows = [
        {
            "samples per rank": str(each),
            "batch": str(each * RANKS),
            **{name: results[name][at].text() for name in names},
        }
        for at, each in enumerate(sizes)
    ]
    figure, (plot,) = axes(f"digits after {steps} steps on {RANKS} ranks")
    for number, name in enumerate(names):
        line(plot, sizes, results[name], name, number, ls="--" if number == 2 else "-")
    plot.set(xscale="log", xlabel="samples per rank", ylabel="accuracy on the test part, %")
    numbers_on(plot.xaxis, sizes)
    in_per_cent(plot)
    plot.legend(frameon=False, loc="lower right")
    gap = [
        results["SyncBatchNorm"][at].mean - results["local batch norm"][at].mean
        for at in range(len(sizes))
    ]
    said = [
        f"With {sizes[0]} samples per rank SyncBatchNorm is {gap[0]:.1f} points better than local "
        f"batch norm, with {sizes[-1]} {gap[-1]:.1f} points.",
        f"Test accuracy in per cent, mean and 95% over {len(seeds)} seeds. torch's SyncBatchNorm "
        "trains on GPUs only; dpcore's DataParallel lets it train on a CPU.",
    ]
    facts = {
        "samples_per_rank": sizes,
        "accuracy": {name: [s._asdict() for s in found] for name, found in results.items()},
    }
    finish(chosen, rows, figure, facts, said)


if __name__ == "__main__":
    main()
