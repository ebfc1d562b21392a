"""As one JSON: `python -m benchmarks.gpu --out FILE`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dpcore
from benchmarks.gpu.kernels import PLACE, copy_rate, flattening, reduction
from benchmarks.gpu.sharing import WAYS, all_reduce, shared_steps
from benchmarks.gpu.steps import Contender, gpt2, many_tensors, resnet50, steps
from dpcore import _C
from dpcore.base.files import write_whole
from dpcore.comm.communicators.nccl import nccl_library
from dpcore.tools.records import run_facts
from tools.gpu_machine import driver_release

Row = dict[str, Any]
Told = Callable[[list[Row], dict[str, str]], None]
MODELS: dict[str, Callable[..., Contender]] = {
    "gpt2-124m-bf16": gpt2,
    "resnet50-bf16": resnet50,
    "400-tensors": many_tensors,
}
DESCRIPTION = """\
Kernels: time on the GPU as its profiler has it, beside a copy of the same bytes between two buffers
of the GPU. All-reduce: ranks that share the GPU, in memory that all of them have mapped, beside a
copy of the same traffic. Training: a step with a world of one through dpcore's buckets over NCCL,
through torch's DistributedDataParallel, and without either; and of two ranks that share the GPU,
through mapped memory and through torch's over Gloo. Interleaved, medians. Rows with a target say
whether they reach it; steps in which dpcore did not launch one copy per bucket are failures.
The file is written anew after every section.
"""


def judge(row: Row) -> None:
    """Says whether a row with a target reaches it: at least so much of a copy's rate, at most so
    much of torch's time. One that measured something else does not."""
    if "target_of_copy" in row and "of_copy" in row:
        row["reached"] = row["of_copy"] >= row["target_of_copy"]
    elif "target_of_torch" in row:
        row["reached"] = row["of_torch"] <= row["target_of_torch"] and "wrong" not in row


def facts() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(PLACE)
    return {
        **run_facts({"": {"torch": torch.__version__}}, {}),
        "gpu": properties.name,
        "driver_release": driver_release(),
        "gpu_memory": properties.total_memory,
        "cuda_probe": _C.cuda_probe(),
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "nccl": nccl_library(),
    }


def compare_with_copies(results: list[Row]) -> None:
    bound = results[0]["bytes_per_s"] if results and results[0]["what"] == "copy" else None
    for row in results:
        if bound and "bytes_per_s" in row:
            row["of_copy"] = row["bytes_per_s"] / bound
        judge(row)


def measured(
    ends_at: float = float("inf"), told: Told = lambda *_: None, only: str = ""
) -> tuple[list[Row], dict[str, str]]:
    """All rows, and what failed: one that does leaves the others alone, since whoever has a GPU has
    it for a short time. `told` hears of them after each section; none begins after `ends_at`.
    `only`: what a section's name begins with; the copy, their bound, is always measured."""
    results: list[Row] = []
    failures: dict[str, str] = {}

    def add(name: str, make: Callable[[], list[Row]]) -> None:
        if name != "copy" and not name.startswith(only):
            return
        begin = time.monotonic()
        if begin > ends_at:
            failures[name] = f"{name}: no time was left"
            return
        try:
            rows = make()
        except Exception as problem:
            failures[name] = f"{name}: {type(problem).__name__}: {problem}"
            told(results, failures)
            return
        results.extend(row | {"section": name} for row in rows)
        if wrong := [row["wrong"] for row in rows if "wrong" in row]:
            failures[name] = f"{name}: {wrong[0]}"
        compare_with_copies(results)
        told(results, failures)
        print(f"{time.monotonic() - begin:6.1f} s  {name}", file=sys.stderr, flush=True)

    add("copy", lambda: [{"what": "copy", "bytes_per_s": copy_rate()}])
    for dtype in ("float32", "bfloat16", "float16"):
        add(f"reduction {dtype}", partial(_reductions, dtype))
    for elements, kind in ((4096, "float32"), (65536, "float32"), (65536, "bfloat16")):
        add(f"flatten {elements} {kind}", partial(flattening, 1000, elements, kind))
    for way in WAYS:
        for world in (2, 4):
            name = " ".join(["all_reduce", *(word for word in way if word != "each"), str(world)])
            add(name, partial(all_reduce, *way, world))
    for name in ("400-tensors", "gpt2-124m-bf16"):
        add(f"shared step {name}", partial(shared_steps, name, MODELS[name]))
    for name, make in MODELS.items():
        add(f"step {name}", partial(_steps_of_one, name, make))
    return results, failures


def _reductions(dtype: str) -> list[Row]:
    return [reduction(dtype, inputs) for inputs in (2, 4, 8)]


def _steps_of_one(name: str, make: Callable[..., Contender]) -> list[Row]:
    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    try:
        return steps(name, make, dpcore.init("nccl", rank=0, world_size=1, device=PLACE))
    finally:
        dpcore.finalize()
        dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, help="the file to write; otherwise standard output")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="about so long")
    parser.add_argument("--only", default="", help='sections that begin so, as "shared step"')
    options = parser.parse_args()
    ends_at = time.monotonic() + options.seconds
    # Ranks that are threads: their streams must not queue behind each other's waits.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    # Nor may the first launch of a kernel load it, which waits for the whole device. The driver
    # reads this when it starts, here. Ranks that are processes start sooner without.
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
    if has_gpu := torch.cuda.is_available():
        torch.cuda.init()  # or the context, made later, would read the next value
    os.environ["CUDA_MODULE_LOADING"] = "LAZY"
    if not has_gpu:
        problem = _C.cuda_probe()["problem"] or "torch sees none: install a CUDA build of it"
        print(f"no GPU: {problem}", file=sys.stderr)
        return 1
    known = facts()

    def write(results: list[Row], failures: dict[str, str]) -> str:
        text = json.dumps({**known, "failures": failures, "results": results}, indent=1)
        if options.out is not None:
            # Whole also when this process is ended in the middle.
            write_whole(options.out, text + "\n")
        return text

    write([], {})
    results, failures = measured(ends_at, write, options.only)
    text = write(results, failures)
    if options.out is None:
        print(text)
    for problem in failures.values():
        print(problem, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
