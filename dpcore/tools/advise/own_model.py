"""Runs some steps of a user's model under a recorder: ``dpcore advise my.py:make``."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

STACKS = ("torch", "dpcore")
_WARM, _RECORDED = 4, 8
_SETTLING = 60  # at most, in which DataParallel without arguments finds out about its buckets


def record(name: str, stack: str, world: int, folder: Path, link: str = "") -> list[Path]:
    """The files that the ranks have written."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # or the profiler prints a line when it begins

    import dpcore as dp

    options = {"link": link} if link else {}
    dp.spawn(_train, world, name, stack, str(folder), timeout=120.0, **options)
    return sorted(folder.iterdir())


def _train(comm: Any, name: str, stack: str, folder: str) -> None:
    import torch

    import dpcore as dp
    from dpcore.tools.compare.training.making import Stepping, made

    torch.manual_seed(0)
    stepping = Stepping(name, made(name, comm.rank, comm.world_size))
    stepping.look()
    searches = bool(stepping.unused)
    if stack == "dpcore":
        model: Any = dp.DataParallel(stepping.module, comm=comm, find_unused_parameters=searches)
        for _ in range(_SETTLING):
            _step(stepping, model)
        with dp.trace(os.path.join(folder, "run.json"), comm=comm):
            for _ in range(_RECORDED):
                _step(stepping, model)
        return
    import torch.distributed as dist
    from torch.profiler import ProfilerActivity, profile

    store = os.path.join(os.path.dirname(folder), "store")
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=comm.rank, world_size=comm.world_size
    )
    model = torch.nn.parallel.DistributedDataParallel(
        stepping.module, find_unused_parameters=searches
    )
    for _ in range(_WARM):
        _step(stepping, model)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for _ in range(_RECORDED):
            _step(stepping, model)
            profiler.step()
    profiler.export_chrome_trace(os.path.join(folder, f"rank{comm.rank}.json"))
    dist.barrier()
    time.sleep(0.1)  # until the threads of Gloo have let go of the barrier's tensors
    dist.destroy_process_group()


def _step(stepping: Any, model: Any) -> None:
    model.zero_grad()
    stepping.step(model)
