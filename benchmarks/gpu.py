"""What the GPU part reaches, on one GPU, as one JSON: `python -m benchmarks.gpu --out FILE`."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import dpcore
from benchmarks.harness.records import command_line, commit, machine
from benchmarks.training.models import Language, ManyTensors
from dpcore import _C
from dpcore.nccl import nccl_library

DESCRIPTION = """\
Kernels: time on the GPU as its profiler has it, beside a copy of the same bytes between two buffers
of the GPU. All-reduce: ranks that share the GPU, in memory that all of them have mapped, beside a
copy of the same traffic. Training: a step with a world of one through dpcore's buckets over NCCL,
through torch's DistributedDataParallel, and without either, interleaved; medians.
"""
PLACE = "cuda:0"
REDUCED_BYTES = 256 << 20
ROUNDS = 7
STEPS = 20


def kernel_seconds(call: Callable[[], object], name: str) -> float:
    """The median time of kernels (or copies) of this name."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(ROUNDS):
            call()
        torch.cuda.synchronize()
    times = [e.device_time for e in profiler.events() if name in e.name and e.device_time > 0]
    if not times:
        raise RuntimeError(f"the profiler has seen no {name}")
    return statistics.median(times) * 1e-6


def copy_rate() -> float:
    """Bytes read plus bytes written per second."""
    source = torch.empty(REDUCED_BYTES, dtype=torch.uint8, device=PLACE)
    target = torch.empty_like(source)
    return 2 * REDUCED_BYTES / kernel_seconds(lambda: target.copy_(source), "Memcpy DtoD")


def reduction(dtype: str, inputs: int) -> dict[str, Any]:
    """The mean of several arrays, written over all of them, as a push all-reduce does."""
    kind = getattr(torch, dtype)
    arrays = [torch.ones(REDUCED_BYTES // kind.itemsize, device=PLACE).to(kind)]
    arrays += [arrays[0].clone() for _ in range(inputs - 1)]
    at = [array.data_ptr() for array in arrays]
    count = arrays[0].numel()

    def call() -> None:
        _C._reduce(dtype, "mean", at, at, count, 1 / inputs, place=PLACE)

    seconds = kernel_seconds(call, "reduce_kernel")
    rate = 2 * inputs * REDUCED_BYTES / seconds
    return {"what": "reduction", "dtype": dtype, "inputs": inputs, "bytes_per_s": rate}


def flattening(count: int, elements: int) -> list[dict[str, Any]]:
    tensors = [torch.ones(elements, device=PLACE) for _ in range(count)]
    flat = torch.zeros(count * elements, device=PLACE)
    parts = [(t.data_ptr(), 4 * elements * i, elements) for i, t in enumerate(tensors)]
    results = []
    for to_flat in (True, False):

        def call(to_flat: bool = to_flat) -> None:
            _C._copy_parts(parts, "float32", flat.data_ptr(), "float32", to_flat, place=PLACE)

        rate = 2 * flat.nbytes / kernel_seconds(call, "copy_kernel")
        name = "flatten" if to_flat else "unflatten"
        results.append({"what": name, "tensors": count, "elements": elements, "bytes_per_s": rate})
    return results


def all_reduce_seconds(control: Any, meeting: str) -> list[float]:
    """Of each round on this rank, by events in its stream."""
    from dpcore.device_communicator import on_device

    os.environ["DPCORE_CUDA_SYNC"] = meeting
    device = torch.device(PLACE)
    torch.cuda.set_device(device)
    comm = on_device(control, "cuda", device, timeout=60.0, algorithm="auto", deterministic=False)
    seconds = []
    with torch.cuda.stream(torch.cuda.Stream(device)):
        x = comm.empty(REDUCED_BYTES // 4, dtype=torch.float32).fill_(1.0)
        for _ in range(ROUNDS + 2):
            comm.barrier()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            comm.all_reduce(x, "mean", algorithm="two_shot")
            end.record()
            end.synchronize()
            seconds.append(begin.elapsed_time(end) * 1e-3)
        if comm.stats()["paths"] != {"direct/push": ROUNDS + 2}:
            raise RuntimeError(f"another path was taken: {comm.stats()}")
        comm.barrier()
    comm.close()
    return seconds[2:]


def all_reduces() -> list[dict[str, Any]]:
    """Two-shot push: every rank reads and writes as many bytes as the buffer has. Kernels that wait
    for each other run side by side only in one process."""
    results = []
    for mode, meeting in (("threads", "stream"), ("threads", "fused"), ("processes", "stream")):
        for world in (2, 4):
            of_ranks = dpcore.spawn(all_reduce_seconds, world, meeting, mode=mode, timeout=120.0)
            rounds = [max(times) for times in zip(*of_ranks, strict=True)]
            rate = 2 * world * REDUCED_BYTES / statistics.median(rounds)
            results.append(
                {
                    "what": "all_reduce",
                    "mode": mode,
                    "meeting": meeting,
                    "world": world,
                    "bytes_per_s": rate,
                }
            )
    return results


def gpt2(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], None]:
    model = wrap(Language(50257, 768, 12, 12, 512).to(PLACE, torch.bfloat16))
    tokens = torch.randint(0, 50257, (8, 512), device=PLACE)

    def step() -> None:
        model.zero_grad()
        model(tokens).float().logsumexp(-1).mean().backward()

    return step


def many_tensors(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], None]:
    model = wrap(ManyTensors().to(PLACE))
    x = torch.ones(5000, device=PLACE)

    def step() -> None:
        model.zero_grad()
        model(x).backward()

    return step


def steps(name: str, make: Callable[..., Callable[[], None]], comm: Any) -> list[dict[str, Any]]:
    """Median seconds of a step for each contender, round by round one after the other."""
    contenders = {
        "alone": make(lambda module: module),
        "dpcore": make(lambda module: dpcore.DataParallel(module, comm=comm)),
        "torch": make(nn.parallel.DistributedDataParallel),
    }
    rounds: dict[str, list[float]] = {contender: [] for contender in contenders}
    for _ in range(ROUNDS + 1):
        for contender, step in contenders.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(STEPS):
                step()
            end.record()
            torch.cuda.synchronize()
            rounds[contender].append(begin.elapsed_time(end) * 1e-3 / STEPS)
    return [
        {"what": "step", "model": name, "contender": c, "seconds": statistics.median(times[1:])}
        for c, times in rounds.items()
    ]


def facts() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(PLACE)
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": command_line(),
        "commit": commit(),
        "machine": machine(),
        "gpu": properties.name,
        "gpu_memory": properties.total_memory,
        "cuda_probe": _C.cuda_probe(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "nccl": nccl_library(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="the file to write; otherwise standard output")
    options = parser.parse_args()
    # Ranks that are threads: their streams must not queue behind each other's waits.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if not torch.cuda.is_available():
        print(f"no GPU: {_C.cuda_probe()['problem']}", file=sys.stderr)
        return 1
    bound = copy_rate()
    results: list[dict[str, Any]] = [{"what": "copy", "bytes_per_s": bound}]
    for dtype in ("float32", "bfloat16", "float16"):
        results += [reduction(dtype, inputs) for inputs in (2, 4, 8)]
    results += flattening(1000, 4096) + flattening(1000, 65536) + all_reduces()
    for result in results:
        result["of_copy"] = result["bytes_per_s"] / bound
    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    comm = dpcore.init("nccl", rank=0, world_size=1, device=PLACE)
    results += steps("gpt2-124m-bf16", gpt2, comm) + steps("400-tensors", many_tensors, comm)
    dpcore.finalize()
    dist.destroy_process_group()
    text = json.dumps({**facts(), "results": results}, indent=1)
    if options.out is None:
        print(text)
    else:
        options.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
