"""As one JSON: `python -m benchmarks.gpu --out FILE`."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dpcore
from benchmarks.gpu.kernels import PLACE, copy_rate, flattening, reduction
from benchmarks.gpu.sharing import all_reduces, shared_steps
from benchmarks.gpu.steps import gpt2, many_tensors, resnet50, steps
from benchmarks.harness.records import command_line, commit, machine
from dpcore import _C
from dpcore.nccl import nccl_library

DESCRIPTION = """\
Kernels: time on the GPU as its profiler has it, beside a copy of the same bytes between two buffers
of the GPU. All-reduce: ranks that share the GPU, in memory that all of them have mapped, beside a
copy of the same traffic. Training: a step with a world of one through dpcore's buckets over NCCL,
through torch's DistributedDataParallel, and without either; and of two ranks that share the GPU,
through mapped memory and through torch's over Gloo. Interleaved, medians. Rows with a target say
whether they reach it; how often dpcore launched copies of gradients is checked, not measured.
"""


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
    # Ranks that are threads: their streams must not queue behind each other's waits.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if not torch.cuda.is_available():
        print(f"no GPU: {_C.cuda_probe()['problem']}", file=sys.stderr)
        return 1
    bound = copy_rate()
    results: list[dict[str, Any]] = [{"what": "copy", "bytes_per_s": bound}]
    for dtype in ("float32", "bfloat16", "float16"):
        results += [reduction(dtype, inputs) for inputs in (2, 4, 8)]
    results += flattening(1000, 4096) + flattening(1000, 65536)
    results += flattening(1000, 65536, "bfloat16")
    results += all_reduces()
    for result in results:
        result["of_copy"] = result["bytes_per_s"] / bound
    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    comm = dpcore.init("nccl", rank=0, world_size=1, device=PLACE)
    results += steps("gpt2-124m-bf16", gpt2, comm) + steps("resnet50-bf16", resnet50, comm)
    results += steps("400-tensors", many_tensors, comm)
    dpcore.finalize()
    dist.destroy_process_group()
    results += shared_steps()
    for result in results:
        judge(result)
    text = json.dumps({**facts(), "results": results}, indent=1)
    if options.out is None:
        print(text)
    else:
        options.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
