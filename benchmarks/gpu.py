"""What the GPU part reaches, on one GPU, as one JSON: `python -m benchmarks.gpu --out FILE`."""

from __future__ import annotations

import argparse
import datetime
import json
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
from benchmarks.training.models import Language, ManyTensors, ResNet50
from dpcore import _C
from dpcore.nccl import nccl_library

DESCRIPTION = """\
Kernels: time on the GPU as its profiler has it, beside a copy of the same bytes between two buffers
of the GPU. Training: a step with a world of one through dpcore's buckets over NCCL, through torch's
DistributedDataParallel, and without either, interleaved; medians. Rows with a target say whether
they reach it; how often dpcore launched copies of gradients is checked, not measured.
"""
PLACE = "cuda:0"
FLATTEN_TARGET = 0.85  # of a copy's rate
STEP_TARGET = 0.95  # of the time of torch's, or less
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


def flattening(count: int, elements: int, flat_type: str = "float32") -> list[dict[str, Any]]:
    """Many gradients in float32 into a bucket and back, cast where the bucket has another type."""
    kind = getattr(torch, flat_type)
    tensors = [torch.ones(elements, device=PLACE) for _ in range(count)]
    flat = torch.zeros(count * elements, dtype=kind, device=PLACE)
    parts = [(t.data_ptr(), kind.itemsize * elements * i, elements) for i, t in enumerate(tensors)]
    results = []
    for to_flat in (True, False):

        def call(to_flat: bool = to_flat) -> None:
            launches = _C._copy_parts(
                parts, "float32", flat.data_ptr(), flat_type, to_flat, place=PLACE
            )
            if launches != 1:
                raise RuntimeError(f"{count} tensors took {launches} launches instead of one")

        moved = flat.nbytes + sum(tensor.nbytes for tensor in tensors)
        row = {
            "what": "flatten" if to_flat else "unflatten",
            "tensors": count,
            "elements": elements,
            "flat": flat_type,
            "bytes_per_s": moved / kernel_seconds(call, "copy_kernel"),
        }
        if flat_type == "float32":
            row["target_of_copy"] = FLATTEN_TARGET
        results.append(row)
    return results


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


def steps(name: str, make: Callable[..., Contender], comm: Any) -> list[dict[str, Any]]:
    """Median seconds of a step for each contender, round by round one after the other. torch is
    taken as it comes and with its gradients as views, and compared with the faster one."""
    torchs = nn.parallel.DistributedDataParallel
    made = {
        "alone": make(lambda module: module),
        "dpcore": make(lambda module: dpcore.DataParallel(module, comm=comm)),
        "torch": make(torchs),
        "torch, views": make(lambda module: torchs(module, gradient_as_bucket_view=True)),
    }
    contenders = {contender: step for contender, (_, step) in made.items()}
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
    seconds = {c: statistics.median(times[1:]) for c, times in rounds.items()}
    rows: list[dict[str, Any]] = [
        {"what": "step", "model": name, "contender": c, "seconds": s} for c, s in seconds.items()
    ]
    rows[1]["launches_per_step"] = check_launches(*made["dpcore"])
    rows[1]["of_torch"] = seconds["dpcore"] / min(seconds["torch"], seconds["torch, views"])
    rows[1]["target_of_torch"] = STEP_TARGET
    return rows


def judge(row: dict[str, Any]) -> None:
    """Says whether a row with a target reaches it: at least so much of a copy's rate, at most so
    much of torch's time."""
    if "target_of_copy" in row:
        row["reached"] = row["of_copy"] >= row["target_of_copy"]
    elif "target_of_torch" in row:
        row["reached"] = row["of_torch"] <= row["target_of_torch"]


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
    if not torch.cuda.is_available():
        print(f"no GPU: {_C.cuda_probe()['problem']}", file=sys.stderr)
        return 1
    bound = copy_rate()
    results: list[dict[str, Any]] = [{"what": "copy", "bytes_per_s": bound}]
    for dtype in ("float32", "bfloat16", "float16"):
        results += [reduction(dtype, inputs) for inputs in (2, 4, 8)]
    results += flattening(1000, 4096) + flattening(1000, 65536)
    results += flattening(1000, 65536, "bfloat16")
    for result in results:
        result["of_copy"] = result["bytes_per_s"] / bound
    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    comm = dpcore.init("nccl", rank=0, world_size=1, device=PLACE)
    results += steps("gpt2-124m-bf16", gpt2, comm) + steps("resnet50-bf16", resnet50, comm)
    results += steps("400-tensors", many_tensors, comm)
    for result in results:
        judge(result)
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
