"""Kernels and copies: bytes per second of a GPU, by its own clock."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch

from dpcore import _C

PLACE = "cuda:0"
FLATTEN_TARGET = 0.85  # of a copy's rate
REDUCED_BYTES = 256 << 20
ROUNDS = 7


def kernel_seconds(call: Callable[[], object], name: str) -> float:
    """The median time of kernels (or copies) of this name, by the profiler; where that sees nothing
    (it may be forbidden to), by events around each call, which is a little more."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(ROUNDS):
                call()
            torch.cuda.synchronize()
        times = [e.device_time for e in profiler.events() if name in e.name and e.device_time > 0]
    except RuntimeError:
        times = []
    if not times:
        print(f"the profiler has seen no {name}: timed by events", file=sys.stderr)
        times = [_seconds_by_events(call) * 1e6 for _ in range(ROUNDS)]
    return statistics.median(times) * 1e-6


def _seconds_by_events(call: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3


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
        _C._reduce(dtype, "mean", at, at, count, 1 / inputs, device=PLACE)

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
                parts, "float32", flat.data_ptr(), flat_type, to_flat, device=PLACE
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
