"""What does data parallel training add to a step? `python -m benchmarks.ddp_step`

A step is zero_grad, forward and backward. Each rank holds the model once per contender and runs
them in turn, a few steps each, again and again, so that a slow minute falls on all alike:

    alone       no communication, all ranks computing at once: what is subtracted
    torch       torch DDP over Gloo, with the best options it has for this
    dpcore ...  dpcore.DataParallel

The figure is the overhead: a contender's step minus `alone`'s, of the slowest rank, medians over
rounds. Optimizers are left out: they cost everybody the same.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dpcore as dp
from benchmarks.harness.contenders import ROOT
from benchmarks.harness.records import append, run_facts
from benchmarks.training.models import MODELS

CONTENDERS = ("alone", "torch", "dpcore bucketed", "dpcore sequential")
TARGETS = {"mlp": 0.3, "transformer": 0.5, "many": 0.3}  # overhead over torch's, 2 ranks


def wrapped(name: str, model: torch.nn.Module, comm: Any) -> torch.nn.Module:
    """The model as the contender trains it."""
    if name == "alone":
        return model
    if name == "torch":
        return torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if name == "torch, 100 MiB":
        return torch.nn.parallel.DistributedDataParallel(
            model, gradient_as_bucket_view=True, bucket_cap_mb=100
        )
    return dp.DataParallel(model, comm=comm, schedule=name.removeprefix("dpcore "))


def measure(
    comm: Any, model_name: str, contenders: list[str], rounds: int, steps: int, store: str
) -> dict[str, list[float]]:
    """On a rank: seconds per step, per contender and round."""
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=comm.rank, world_size=comm.world_size
    )
    torch.manual_seed(comm.rank)
    loops: dict[str, Callable[[int], float]] = {}
    for name in contenders:
        module, forward = MODELS[model_name]()
        loops[name] = loop(wrapped(name, module, comm), forward)
    for name in contenders:  # the first steps rebuild buckets and touch memory
        loops[name](3)
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds):
        for at in range(len(contenders)):
            name = contenders[(at + number) % len(contenders)]
            comm.barrier()
            seconds[name].append(loops[name](steps))
    comm.barrier()
    dist.destroy_process_group()
    return seconds


def loop(model: torch.nn.Module, forward: Any) -> Callable[[int], float]:
    def seconds_per_step(steps: int) -> float:
        begin = time.perf_counter()
        for _ in range(steps):
            model.zero_grad()
            forward(model).backward()
        return (time.perf_counter() - begin) / steps

    return seconds_per_step


def slowest(of_ranks: list[dict[str, list[float]]], name: str) -> list[float]:
    return [max(times) for times in zip(*(of_rank[name] for of_rank in of_ranks), strict=True)]


def report(model: str, world: int, of_ranks: list[Any], contenders: list[str]) -> list[Any]:
    """Prints the table of one cell and returns its records."""
    rounds = {name: slowest(of_ranks, name) for name in contenders}
    # Each contender's step against the one of `alone` in the same round.
    over = {
        name: statistics.median(
            mine - base for mine, base in zip(times, rounds["alone"], strict=True)
        )
        for name, times in rounds.items()
    }
    best_torch = min(over[name] for name in contenders if name.startswith("torch"))
    target = f" (target: {TARGETS[model]} of torch)" if world == 2 and model in TARGETS else ""
    print(f"\n{model}, {world} ranks{target}")
    print(f"{'':24}{'step ms':>10}{'overhead ms':>13}{'of torch':>10}")
    lines = []
    for name in contenders:
        step = statistics.median(rounds[name])
        ratio = over[name] / best_torch if name != "alone" else None
        shown = "" if ratio is None else f"{ratio:.2f}"
        print(f"{name:24}{step * 1e3:>10.2f}{over[name] * 1e3:>13.2f}{shown:>10}", flush=True)
        lines.append(
            {
                "model": model,
                "world": world,
                "contender": name,
                "step_s": step,
                "overhead_s": over[name],
                "overhead_of_torch": ratio,
                "rounds_s": rounds[name],
            }
        )
    return lines


def main() -> None:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--models", default="mlp,transformer,many,gpt2")
    made.add_argument("--worlds", default="2,4")
    made.add_argument("--contenders", default=",".join(CONTENDERS))
    made.add_argument("--rounds", type=int, default=9)
    made.add_argument("--seconds", type=float, default=0.5, help="of one contender in a round")
    made.add_argument("--json", type=Path, default=ROOT / "benchmarks/results/ddp_step.jsonl")
    options = made.parse_args()
    contenders = options.contenders.split(",")
    facts = run_facts({"": {"torch": torch.__version__}}, {"rounds": options.rounds})
    guesses = {"mlp": 0.4, "transformer": 0.15, "many": 0.012, "gpt2": 1.5}
    for model in options.models.split(","):
        for world in map(int, options.worlds.split(",")):
            steps = max(1, int(options.seconds / guesses[model]))
            store = f"/dev/shm/dpcore-ddp-step-{uuid.uuid4().hex}"
            try:
                of_ranks = dp.spawn(
                    measure, world, model, contenders, options.rounds, steps, store, timeout=300
                )
            finally:
                Path(store).unlink(missing_ok=True)
            lines = report(model, world, of_ranks, contenders)
            append(options.json, [facts | {"load": os.getloadavg()[0]} | line for line in lines])


if __name__ == "__main__":
    main()
