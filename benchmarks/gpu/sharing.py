"""Ranks that share one GPU: all-reduces in mapped memory, and training beside DDP over Gloo."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import dpcore
from benchmarks.gpu.kernels import PLACE, REDUCED_BYTES, ROUNDS
from benchmarks.gpu.steps import Contender
from dpcore.tools.compare.training.ranks import beside_gloo, of_slowest
from dpcore.tools.ratios import in_turn, of_slowest_rank

PUSH_TARGET = 0.80  # of a copy's rate, of ranks that are threads
SHARED_TARGET = 0.5  # of the time of torch's over Gloo, or less
SHARED_STEPS = 3
# Ranks come out of a barrier at different moments: many operations, so that this does not count.
IN_A_ROW = 10
# Kernels that wait for each other run side by side only in one process. The last way has the host
# wait, and no stream of the program (docs/decisions/0045).
WAYS = (
    ("threads", "stream", "each"),
    ("threads", "fused", "each"),
    ("processes", "stream", "each"),
    ("processes", "stream", "on the host"),
)
SETTINGS: dict[str, Any] = {"timeout": 20.0, "algorithm": "auto", "deterministic": False}


def all_reduce_seconds(control: Any, meeting: str, awaited: str) -> list[float]:
    """Of each round on this rank, by events in its stream."""
    from dpcore.comm.communicators.device import on_device

    os.environ["DPCORE_CUDA_SYNC"] = meeting  # of all ranks that are threads: see all_reduce
    device = torch.device(PLACE)
    torch.cuda.set_device(device)
    comm = on_device(control, "cuda", device, **SETTINGS)
    seconds = []  # of one all-reduce
    with torch.cuda.stream(torch.cuda.Stream(device)):
        x = comm.empty(REDUCED_BYTES // 4, dtype=torch.float32).fill_(1.0)
        for _ in range(ROUNDS + 2):
            comm.barrier()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(IN_A_ROW):
                work = comm.all_reduce(x, "mean", algorithm="two_shot", async_op=True)
                if awaited == "each":
                    work.wait()
            if awaited == "on the host":
                work.wait(timeout=SETTINGS["timeout"])
            end.record()
            end.synchronize()
            seconds.append(begin.elapsed_time(end) * 1e-3 / IN_A_ROW)
        if comm.stats()["paths"] != {"direct/push": IN_A_ROW * (ROUNDS + 2)}:
            raise RuntimeError(f"another path was taken: {comm.stats()}")
        comm.barrier()
    comm.close()
    return seconds[2:]


def all_reduce(mode: str, meeting: str, awaited: str, world: int) -> list[dict[str, Any]]:
    """Two-shot push: every rank reads and writes as many bytes as the buffer has."""
    before = os.environ.copy()
    try:
        arguments = (meeting, awaited)
        of_ranks = dpcore.spawn(all_reduce_seconds, world, *arguments, mode=mode, timeout=60.0)
    finally:
        os.environ.clear()
        os.environ.update(before)
    rounds = of_slowest_rank(of_ranks)
    row = {"what": "all_reduce", "mode": mode, "meeting": meeting, "awaited": awaited}
    row["world"] = world
    row["bytes_per_s"] = 2 * world * REDUCED_BYTES / statistics.median(rounds)
    # Kernels that wait are small, for a GPU each: where ranks share one none is used.
    if mode == "threads" and meeting == "stream":
        row["target_of_copy"] = PUSH_TARGET
    return [row]


@beside_gloo
def steps_of_rank(
    control: Any, make: Callable[..., Contender], folder: str
) -> dict[str, list[float]]:
    """Seconds of a step of each contender on this rank, round by round in turns."""
    from dpcore.comm.communicators.device import on_device

    os.environ["DPCORE_CUDA_SYNC"] = "stream"  # kernels of two processes take turns
    device = torch.device(PLACE)
    torch.cuda.set_device(device)
    comm = on_device(control.split(0), "cuda", device, **SETTINGS)  # which closes what it is given
    torchs = nn.parallel.DistributedDataParallel
    made = {
        "alone": make(lambda module: module),
        "dpcore": make(lambda module: dpcore.DataParallel(module, comm=comm)),
        "torch over gloo": make(lambda module: torchs(module, gradient_as_bucket_view=True)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in made}
    for number in range(ROUNDS + 1):
        for name, (_, step) in in_turn(list(made.items()), number):
            torch.cuda.synchronize()
            control.barrier()
            begin = time.perf_counter()
            for _ in range(SHARED_STEPS):
                step()
            torch.cuda.synchronize()
            seconds[name].append((time.perf_counter() - begin) / SHARED_STEPS)
    comm.close()
    return {name: times[1:] for name, times in seconds.items()}


def shared_steps(model: str, make: Callable[..., Contender]) -> list[dict[str, Any]]:
    """Two processes on the GPU: the slowest rank's step, medians over rounds. Alone: both train,
    and nothing is sent."""
    with tempfile.TemporaryDirectory(prefix="dpcore-") as folder:
        of_ranks = dpcore.spawn(steps_of_rank, 2, make, folder, timeout=60.0)
    seconds = {name: statistics.median(times) for name, times in of_slowest(of_ranks).items()}
    rows: list[dict[str, Any]] = [
        {"what": "shared step", "model": model, "contender": name, "seconds": value}
        for name, value in seconds.items()
    ]
    of_dpcore = next(row for row in rows if row["contender"] == "dpcore")
    of_dpcore["of_torch"] = seconds["dpcore"] / seconds["torch over gloo"]
    of_dpcore["target_of_torch"] = SHARED_TARGET
    return rows
