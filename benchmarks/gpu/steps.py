"""Training with a world of one, the bucket path taken, beside torch DDP."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import dpcore
from benchmarks.gpu.kernels import PLACE
from benchmarks.gpu.models import ResNet50
from dpcore.tools.compare.training.models import Language, ManyTensors
from dpcore.tools.ratios import in_turn, paired

STEP_TARGET = 0.95  # of the time of torch's, or less
STEPS, ROUNDS = 5, 25  # short turns, many of them: what slows the host down slows neighbours, too
OVER_GROUP = "dpcore over torch's group"

Wrap = Callable[[nn.Module], nn.Module]
Contender = tuple[nn.Module, Callable[[], None]]  # the wrapped module, and a step of it


def gpt2(wrap: Wrap, place: str = PLACE, batch: int = 8, length: int = 512) -> Contender:
    model = wrap(Language(50257, 768, 12, 12, 1024).to(place, torch.bfloat16))
    tokens = torch.randint(0, 50257, (batch, length), device=place)

    def step() -> None:
        model.zero_grad()
        model(tokens).float().logsumexp(-1).mean().backward()

    return model, step


def resnet50(wrap: Wrap, place: str = PLACE, batch: int = 64, side: int = 224) -> Contender:
    model = wrap(ResNet50().to(place, torch.bfloat16))
    images = torch.randn(batch, 3, side, side, device=place, dtype=torch.bfloat16)

    def step() -> None:
        model.zero_grad()
        model(images).float().logsumexp(-1).mean().backward()

    return model, step


def many_tensors(wrap: Wrap, place: str = PLACE) -> Contender:
    model = wrap(ManyTensors().to(place))
    x = torch.ones(5000, device=place)

    def step() -> None:
        model.zero_grad()
        model(x).backward()

    return model, step


def check_launches(model: nn.Module, step: Callable[[], None]) -> int:
    """One launch per bucket and step brings all gradients; anything else is not what is measured.
    Returns how many buckets there are."""
    if not isinstance(model, dpcore.DataParallel):
        raise TypeError(f"launches of a {type(model).__name__} are not counted")
    before = model.stats()["copies"]
    step()
    after = model.stats()["copies"]
    buckets = len(model.bucket_report())
    launches, alone = (after[name] - before[name] for name in ("launches", "alone"))
    if (launches, alone) != (buckets, 0):
        raise RuntimeError(
            f"a step with {buckets} buckets took {launches} launches and copied {alone} gradients "
            "alone"
        )
    return buckets


def launches_of(model: nn.Module, step: Callable[[], None]) -> dict[str, Any]:
    """For the row of a measurement; with ``wrong`` its times are of something else."""
    try:
        return {"launches_per_step": check_launches(model, step)}
    except RuntimeError as problem:
        return {"wrong": str(problem)}


def steps(name: str, make: Callable[..., Contender], comm: Any) -> list[dict[str, Any]]:
    """Median seconds of a step for each contender, round by round one after the other; beside them
    the seconds in which the host had called everything. dpcore over NCCL of its own and over
    torch's group, as after changing one import; torch as it comes and with its gradients as views,
    of which the faster one counts."""
    torchs = nn.parallel.DistributedDataParallel
    world = dist.group.WORLD
    made = {
        "alone": make(lambda module: module),
        "dpcore": make(lambda module: dpcore.DataParallel(module, comm=comm)),
        OVER_GROUP: make(lambda module: dpcore.DataParallel(module, process_group=world)),
        "torch": make(torchs),
        "torch, views": make(lambda module: torchs(module, gradient_as_bucket_view=True)),
    }
    rounds: dict[str, list[float]] = {contender: [] for contender in made}
    of_host: dict[str, list[float]] = {contender: [] for contender in made}
    for number in range(ROUNDS + 1):
        for contender, (_, step) in in_turn(list(made.items()), number):
            seconds, called = seconds_of(step)
            rounds[contender].append(seconds)
            of_host[contender].append(called)
    seconds_of_each = {c: statistics.median(times[1:]) for c, times in rounds.items()}
    best = min(("torch", "torch, views"), key=seconds_of_each.__getitem__)
    rows: list[dict[str, Any]] = []
    for contender, of_it in seconds_of_each.items():
        row = {"what": "step", "model": name, "contender": contender, "seconds": of_it}
        row["host_seconds"] = statistics.median(of_host[contender][1:])
        if isinstance(made[contender][0], dpcore.DataParallel):
            ratio = paired(rounds[contender][1:], rounds[best][1:])
            row |= {"of_torch": ratio.median, "of_torch_estimate": asdict(ratio)}
            row |= {"target_of_torch": STEP_TARGET} | launches_of(*made[contender])
        rows.append(row)
    return rows


def seconds_of(step: Callable[[], None]) -> tuple[float, float]:
    """Of one of several steps: on the GPU, and until the host had called it."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    started = time.perf_counter()
    for _ in range(STEPS):
        step()
    called = time.perf_counter() - started
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e-3 / STEPS, called / STEPS
