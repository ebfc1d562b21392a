"""Agree in every step, every 16 steps, or every 16 steps by way of an outer optimizer.

    python examples/local_updates.py [ranks]

A small model learns to add over a link of 20 Mbit/s that is emulated. DataParallel averages the
gradients of every step, LocalSGD the parameters of every 16th, and DiLoCo gives the way that the
ranks went in 16 steps to an optimizer of its own. Streamed, the way travels in four fragments and
in int8 while the ranks compute.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

import dpcore as dp

STEPS = 128
ROWS = 64  # of a rank's batch
SYNC_EVERY = 16


def gradients(module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    return dp.DataParallel(module), nullcontext()


def parameters(module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    return module, dp.LocalSGD(module, optimizer, SYNC_EVERY)


def ways(module: nn.Module, optimizer: torch.optim.Optimizer, **options: int) -> tuple[Any, Any]:
    outer = torch.optim.SGD(module.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    return module, dp.DiLoCo(module, optimizer, outer, SYNC_EVERY, **options)


def streamed(module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    return ways(module, optimizer, fragments=4, fragment_sync_delay=2, bits=8)


def batch(chance: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.rand(ROWS, 8, generator=chance)
    return numbers, numbers.sum(1, keepdim=True)


def train(comm: dp.Communicator, how: Callable[..., tuple[Any, Any]]) -> tuple[float, float, float]:
    """The error on numbers that were not trained on, the megabytes sent, and the seconds."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(8, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh())
    module.append(nn.Linear(128, 1))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.003)
    model, block = how(module, optimizer)
    chance = torch.Generator().manual_seed(comm.rank)
    sent, begin = comm.stats()["sent"]["memory"], time.perf_counter()
    with block:
        for _ in range(STEPS):
            optimizer.zero_grad()
            numbers, sums = batch(chance)
            (model(numbers) - sums).square().mean().backward()
            optimizer.step()
    seconds = time.perf_counter() - begin
    megabytes = (comm.stats()["sent"]["memory"] - sent) / 1e6
    numbers, sums = batch(torch.Generator().manual_seed(99))
    with torch.no_grad():
        return (module(numbers) - sums).square().mean().item(), megabytes, seconds


def compare(comm: dp.Communicator) -> list[tuple[float, float, float]]:
    return [train(comm, how) for how in (gradients, parameters, ways, streamed)]


if __name__ == "__main__":
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    print(f"{STEPS} steps of {ranks} ranks over a link of 20 Mbit/s and 1 ms that is emulated")
    print(f"{'':<20}{'error':>10}{'MB':>8}{'seconds':>10}")
    names = ("DataParallel", "LocalSGD", "DiLoCo", "DiLoCo, streamed")
    results = dp.spawn(compare, ranks, link="20mbit,1ms")[0]
    for name, (error, megabytes, seconds) in zip(names, results, strict=True):
        print(f"{name:<20}{error:>10.4f}{megabytes:>8.2f}{seconds:>10.2f}")
