"""A rank that trains several contenders in turn, and what is computed from all ranks' figures.

A step is zero_grad, forward and backward. Each rank holds the model once per contender and runs
them in turn, a few steps each, again and again, so that a slow minute of the machine falls on all
alike. Optimizers are left out: they cost everybody the same.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dpcore as dp
from benchmarks.training.models import MODELS
from dpcore.reference.ladder import LADDER

ALONE = "alone"  # no communication, all ranks computing at once: what is subtracted
STEPS_OF_THE_LADDER = {cls.__name__: cls for cls in LADDER}
WARM_STEPS = 3  # the first ones rebuild buckets and touch memory

Times = dict[str, list[float]]


def wrapped(name: str, model: torch.nn.Module, comm: Any) -> Any:
    """The model as the contender trains it."""
    if name == ALONE:
        return model
    if name.startswith("torch"):
        options: dict[str, Any] = {"gradient_as_bucket_view": True}
        if name != "torch":
            options["bucket_cap_mb"] = float(name.removeprefix("torch "))
        return torch.nn.parallel.DistributedDataParallel(model, **options)
    if name in STEPS_OF_THE_LADDER:
        return STEPS_OF_THE_LADDER[name](model, comm)
    schedule, *cap = name.removeprefix("dpcore ").split()  # "dpcore bucketed 2": of 2 MiB
    return dp.DataParallel(
        model, comm=comm, schedule=schedule, bucket_cap_mb=float(cap[0]) if cap else None
    )


def step_of(name: str, model_name: str, comm: Any) -> Callable[[], None]:
    module, forward = MODELS[model_name]()
    model = wrapped(name, module, comm)
    finish = getattr(model, "finish", None)

    def step() -> None:
        module.zero_grad()
        forward(model).backward()
        if finish is not None:
            finish()

    return step


@contextlib.contextmanager
def gloo(comm: Any, folder: str) -> Any:
    """torch's group beside ours, for torch DDP."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=comm.rank,
        world_size=comm.world_size,
    )
    try:
        yield
    finally:
        comm.barrier()
        dist.destroy_process_group()


def measure(
    comm: Any, model: str, contenders: Sequence[str], rounds: int, seconds: float, folder: str
) -> Times:
    """On a rank: seconds per step, per contender and round."""
    with gloo(comm, folder):
        torch.manual_seed(comm.rank)
        steps = {name: step_of(name, model, comm) for name in contenders}
        for name in contenders:
            for _ in range(WARM_STEPS):
                steps[name]()
        count = steps_in(seconds, steps[contenders[0]], comm)
        times: Times = {name: [] for name in contenders}
        for number in range(rounds):
            for at in range(len(contenders)):
                name = contenders[(at + number) % len(contenders)]
                comm.barrier()
                begin = time.perf_counter()
                for _ in range(count):
                    steps[name]()
                times[name].append((time.perf_counter() - begin) / count)
    return times


def steps_in(seconds: float, step: Callable[[], None], comm: Any) -> int:
    """How many steps take so long on the slowest rank: the same number on all."""
    begin = time.perf_counter()
    step()
    taken = torch.tensor([time.perf_counter() - begin])
    comm.all_reduce(taken, op="max")
    return max(1, round(seconds / float(taken)))


def spawn(function: Callable[..., Any], world: int, *arguments: Any) -> list[Any]:
    """Runs `function(comm, *arguments, folder)` on every rank."""
    with tempfile.TemporaryDirectory(prefix="dpcore-") as folder:
        return dp.spawn(function, world, *arguments, str(Path(folder)), timeout=300)


def of_slowest(times: Sequence[Times]) -> Times:
    """Per contender and round the rank that took longest."""
    return {
        name: [max(of_ranks) for of_ranks in zip(*(t[name] for t in times), strict=True)]
        for name in times[0]
    }


def overheads(rounds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Median over rounds of a contender's step minus that of `alone` in the same round."""
    return {
        name: statistics.median(
            mine - base for mine, base in zip(times, rounds[ALONE], strict=True)
        )
        for name, times in rounds.items()
    }
