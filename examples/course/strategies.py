"""Strategies side by side: what each keeps on a rank, what it sends, and what a step takes.

    python examples/course/strategies.py

Two ranks, as processes, train a transformer of 3.2 M parameters on a text with AdamW, from the same
weights and with the same batches, once per strategy:

    data parallel       dp.DataParallel: everything on every rank
    zero1               the same with schedule="zero1": a rank keeps its half of AdamW's state
    torch DDP           torch's class, over the backend "dpcore" of torch.distributed
    torch DDP + ZeRO    with torch's ZeroRedundancyOptimizer: half of the state, by whole parameters
    FSDP2               torch's fully_shard, layer by layer: half of everything, gathered when used

Memory is what lies on a rank between two steps: parameters, gradients and the optimizer's state.
What forward keeps for backward comes on top, and is the same for all. The losses must agree.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from data import traffic
from figures import COLOURS, Spread, axes, finish, options, progress, spread
from torch import Tensor, nn

import dpcore as dp
from dpcore.compare.training.text import Text, language_model, loss_of

RANKS, SEQUENCES = 2, 8
Made = tuple[nn.Module, Any, Any]  # the model, its optimizer, and the communicator that is counted


def data_parallel(comm: dp.Communicator, schedule: str = "auto") -> Made:
    model = dp.DataParallel(language_model(Text()), comm=comm, schedule=schedule)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if schedule == "zero1":
        return model, dp.DistributedOptimizer(optimizer, model), comm
    return model, optimizer, comm


def torch_ddp(comm: Any, shards_state: bool = False) -> Made:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(
        language_model(Text()), gradient_as_bucket_view=True
    )
    if shards_state:
        sharded = ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3
        )
        return model, sharded, comm
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), comm


def fsdp2(comm: Any) -> Made:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = language_model(Text()), init_device_mesh("cpu", (RANKS,))
    for layer in model.layers.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), comm


STRATEGIES: dict[str, tuple[Callable[..., Made], bool]] = {  # and whether torch has the group
    "data parallel": (data_parallel, False),
    "zero1": (functools.partial(data_parallel, schedule="zero1"), False),
    "torch DDP": (torch_ddp, True),
    "torch DDP + ZeRO": (functools.partial(torch_ddp, shards_state=True), True),
    "FSDP2": (fsdp2, True),
}


def held(tensors: Iterable[Tensor]) -> int:
    """Bytes on this rank: of a tensor that is sharded, its own part."""
    here = (tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors)
    return sum(tensor.numel() * tensor.element_size() for tensor in here)


def state_tensors(optimizer: Any) -> list[Tensor]:
    optimizer = getattr(optimizer, "optim", optimizer)  # what ZeroRedundancyOptimizer keeps itself
    return [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]


def train(name: str, rank: int, make: Callable[..., Made], comm: Any, steps: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    text = Text()
    model, optimizer, counted = make(comm)
    losses, seconds = [], []
    for step in range(steps + 2):
        if step == 2:
            before = traffic(counted)
        counted.barrier()
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = loss_of(model, text.batch(step, rank, RANKS, RANKS * SEQUENCES))
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
        losses.append(loss.item())
    moved = (traffic(counted) - before) / steps
    parameters = list(model.parameters())  # which finishes what "zero1" has under way
    return {
        "strategy": name,
        "seconds": seconds[2:],
        "loss": losses[-1],
        "moved": moved,
        "parameters": held(parameters),
        "gradients": held(parameters),  # laid out as they are, in buckets or shards
        "state": held(state_tensors(optimizer)),
    }


def on_rank(comm: dp.Communicator, name: str, steps: int, folder: str) -> dict[str, Any]:
    make, is_torchs = STRATEGIES[name]
    rank = comm.rank
    if not is_torchs:
        return train(name, rank, make, comm, steps)
    from dpcore.torch_backend import communicator_of

    dp.finalize()  # torch makes a group of its own
    warnings.simplefilter("ignore")  # of torch, about CPUs
    store = f"file://{Path(folder) / name.replace(' ', '_')}"
    dist.init_process_group("dpcore", init_method=store, rank=rank, world_size=RANKS)
    try:
        return train(name, rank, make, communicator_of(dist.group.WORLD), steps)
    finally:
        dist.destroy_process_group()


def main() -> None:
    chosen = options(__doc__, "strategies")
    steps, rounds = (2, 1) if chosen.quick else (12, 3)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in STRATEGIES}
    times: dict[str, list[float]] = {name: [] for name in STRATEGIES}
    with progress(rounds * len(STRATEGIES), "strategies in turn") as done:
        for _ in range(rounds):
            for name in STRATEGIES:
                with tempfile.TemporaryDirectory() as folder:
                    found = dp.spawn(on_rank, RANKS, name, steps, folder, timeout=120)
                slowest = [max(pair) for pair in zip(*(f["seconds"] for f in found), strict=True)]
                times[name].append(1e3 * statistics.median(slowest))
                runs[name] = found
                done()
    mib = {
        name: {
            what: max(rank[what] for rank in found) / 2**20
            for what in ("parameters", "gradients", "state", "moved")
        }
        for name, found in runs.items()
    }
    step_ms: dict[str, Spread] = {name: spread(found) for name, found in times.items()}
    kept = ("parameters", "gradients", "state")
    total = {name: sum(of[what] for what in kept) for name, of in mib.items()}
    rows = [
        {
            "strategy": name,
            "ms per step": step_ms[name].text(),
            "MiB moved per step": f"{mib[name]['moved']:.1f}",
            "parameters": f"{mib[name]['parameters']:.1f}",
            "gradients": f"{mib[name]['gradients']:.1f}",
            "state": f"{mib[name]['state']:.1f}",
            "MiB in all": f"{total[name]:.1f}",
            "last loss": f"{statistics.fmean(rank['loss'] for rank in runs[name]):.4f}",
        }
        for name in STRATEGIES
    ]
    figure, (left, right) = axes("a step of 2 ranks on one machine", "memory of a rank")
    names = list(STRATEGIES)
    places = range(len(names))
    ends = [[s.mean - s.low for s in step_ms.values()], [s.high - s.mean for s in step_ms.values()]]
    left.barh(places, [s.mean for s in step_ms.values()], xerr=ends, capsize=3, color=COLOURS[0])
    left.set(xlabel=f"ms, 95% over {rounds} runs")
    begin = [0.0] * len(names)
    for number, what in enumerate(kept):
        label = "optimizer's state" if what == "state" else what
        widths = [mib[name][what] for name in names]
        right.barh(places, widths, left=begin, color=COLOURS[number], label=label)
        begin = [a + b for a, b in zip(begin, widths, strict=True)]
    right.set(xlabel="MiB")
    right.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3)
    for plot in (left, right):
        plot.set_yticks(places, names)
        plot.invert_yaxis()
        plot.grid(axis="y", visible=False)
    whole = total["data parallel"]
    said = [
        f"zero1 keeps {total['zero1'] / whole:.2f} of the memory of data parallel training, FSDP2 "
        f"{total['FSDP2'] / whole:.2f}, with {RANKS} ranks.",
        "What is moved is what a rank sends, or reads and writes in memory of the other one; on "
        "one machine that costs little. Over a network it decides: see speed_up.py.",
    ]
    facts = {
        "strategies": [
            {
                "strategy": name,
                "step_ms": step_ms[name]._asdict(),
                "mib": mib[name],
                "loss": statistics.fmean(rank["loss"] for rank in runs[name]),
            }
            for name in names
        ]
    }
    finish(chosen, rows, figure, facts, said)


if __name__ == "__main__":
    main()
