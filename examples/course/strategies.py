"""Strategies side by side: what each keeps on a rank, what it sends, and what a step takes.

    python examples/course/strategies.py

Two ranks, as processes, train a GPT of 3.2 M parameters on a text with AdamW, from the same weights
and with the same 16 sequences in a step, once per strategy:

    data parallel       dp.DataParallel: each rank takes half of the sequences, and has everything
    zero1               the same with schedule="zero1": half of AdamW's state
    zero2               and, of the gradients, half of what was averaged
    torch DDP           torch's class, over the backend "dpcore" of torch.distributed
    torch DDP + ZeRO    with torch's ZeroRedundancyOptimizer: half of the state, by whole parameters
    FSDP2               torch's fully_shard, layer by layer: half of everything, gathered when used
    tensor parallel     half of the heads, and of each matrix; sums of what the halves give
    pipeline            half of the layers; four micro-batches pass from one to the other (1F1B)
    ring attention      half of each sequence's tokens; keys and values go round
    Ulysses             half of each sequence's tokens; within attention, half of the heads

Memory is what lies on a rank between two steps, as the kernel counts it. What forward keeps for
backward comes on top. The losses must agree.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from data import traffic
from figures import COLOURS, Spread, axes, finish, options, over, progress, spread
from torch import Tensor, nn
from transformer import BLOCKS, LENGTH, WIDTH, layers, loss_of, places_of

import dpcore as dp
from dpcore.reference.pipeline import Pipeline
from dpcore.tools.compare.training.held import give_back_at_once, proportional_bytes
from dpcore.tools.compare.training.text import Text

RANKS, SEQUENCES, MICRO_BATCHES = 2, 16, 4
TEXT = Text()
LETTERS = len(TEXT.alphabet)


class Made(NamedTuple):
    model: nn.Module  # what this rank holds of it
    optimizer: Any
    run: Callable[[Tensor], Any]  # forward and backward of all sequences; the loss, if it is here
    counted: Sequence[Any]  # communicators that the step sends by


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def whole(blocks: int, **sharing: Any) -> nn.Module:
    return nn.Sequential(*layers(LETTERS, blocks, **sharing))


def on_part(model: nn.Module, part: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Forward and backward of a part of the inputs and of the targets."""

    def run(batch: Tensor) -> Tensor:
        loss = loss_of(model(part(batch[:, :-1])), part(batch[:, 1:]))
        loss.backward()
        return loss.detach()

    return run


def by_sequences(comm: Any, model: nn.Module, optimizer: Any) -> Made:
    return Made(model, optimizer, on_part(model, lambda x: x.chunk(RANKS)[comm.rank]), [comm])


def data_parallel(comm: Any, blocks: int, schedule: str = "bucketed") -> Made:
    model = dp.DataParallel(whole(blocks), comm=comm, schedule=schedule)
    optimizer: Any = adamw(model)
    if schedule != "bucketed":
        optimizer = dp.DistributedOptimizer(optimizer, model)
    return by_sequences(comm, model, optimizer)


def torch_ddp(comm: Any, blocks: int, shards_state: bool = False) -> Made:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(whole(blocks), gradient_as_bucket_view=True)
    if not shards_state:
        return by_sequences(comm, model, adamw(model))
    sharded = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    return by_sequences(comm, model, sharded)


def fsdp2(comm: Any, blocks: int) -> Made:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = whole(blocks), init_device_mesh("cpu", (RANKS,))
    for layer in model:  # type: ignore[attr-defined]
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return by_sequences(comm, model, adamw(model))


def tensor_parallel(comm: Any, blocks: int) -> Made:
    model = whole(blocks, tensor=comm)
    return Made(model, adamw(model), on_part(model, lambda x: x), [comm])


def pipeline(comm: Any, blocks: int) -> Made:
    plan = dp.pipeline_plan("1F1B", stages=RANKS, microbatches=MICRO_BATCHES)
    made = layers(LETTERS, blocks)
    first, end = (len(made) * stage // RANKS for stage in (comm.rank, comm.rank + 1))
    stage = nn.Sequential(*made[first:end])
    micro = SEQUENCES // MICRO_BATCHES
    pipe = Pipeline(
        plan, {comm.rank: stage}, comm, lambda _: torch.empty(micro, LENGTH, WIDTH), loss_of
    )

    def run(batch: Tensor) -> Tensor | None:
        inputs, targets = batch[:, :-1].split(micro), batch[:, 1:].split(micro)
        loss: Tensor | None = pipe.step(inputs, targets)
        return loss

    return Made(stage, adamw(stage), run, [comm])


def by_tokens(comm: Any, blocks: int, by_heads: bool = False) -> Made:
    """Each token's loss is a sample's: gradients are averaged as those of data parallel ranks."""
    mine = places_of(comm, by_heads)
    of_gradients = comm.split(0, comm.rank)
    shared = whole(blocks, tokens=comm, by_heads=by_heads)
    model = dp.DataParallel(shared, comm=of_gradients, schedule="bucketed")
    return Made(model, adamw(model), on_part(model, lambda x: x[:, mine]), [comm, of_gradients])


STRATEGIES: dict[str, tuple[Callable[[Any, int], Made], bool]] = {  # and if torch has the group
    "data parallel": (data_parallel, False),
    "zero1": (functools.partial(data_parallel, schedule="zero1"), False),
    "zero2": (functools.partial(data_parallel, schedule="zero2"), False),
    "torch DDP": (torch_ddp, True),
    "torch DDP + ZeRO": (functools.partial(torch_ddp, shards_state=True), True),
    "FSDP2": (fsdp2, True),
    "tensor parallel": (tensor_parallel, False),
    "pipeline": (pipeline, False),
    "ring attention": (by_tokens, False),
    "Ulysses": (functools.partial(by_tokens, by_heads=True), False),
}


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """On this rank: of a tensor that is sharded, its own part."""
    here = (tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors)
    return sum(tensor.numel() * tensor.element_size() for tensor in here)


def state_tensors(optimizer: Any) -> list[Tensor]:
    optimizer = getattr(optimizer, "optim", optimizer)  # what ZeroRedundancyOptimizer keeps itself
    return [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]


def train(made: Made, comm: Any, first: int, steps: int) -> dict[str, Any]:
    """Some steps, behind one that is not timed. Nothing is in flight before and after them, or
    bytes of "zero1" and "zero2" would be counted that belong to another step."""
    comm.barrier()
    begin, before, loss = 0.0, sum(map(traffic, made.counted)), None
    for step in range(first, first + steps + 1):
        if step == first + 1:
            begin = time.perf_counter()
        made.optimizer.zero_grad()
        loss = made.run(TEXT.batch(step, 0, 1, SEQUENCES))
        made.optimizer.step()
    seconds = (time.perf_counter() - begin) / steps
    list(made.model.parameters())  # which finishes what "zero1" and "zero2" have under way
    moved = sum(map(traffic, made.counted)) - before
    loss = None if loss is None else loss.item()
    return {"seconds": seconds, "loss": loss, "moved": moved / (steps + 1)}


def held() -> int:
    """Bytes of this process, without garbage."""
    gc.collect()
    give_back_at_once()
    return proportional_bytes()


def weigh(make: Callable[[Any, int], Made], comm: Any) -> dict[str, Any]:
    """Bytes between two steps, of what a rank holds more than before the model was made."""
    give_back_at_once()  # too slow to be timed, so these ranks are others than the timed ones
    alone = whole(1)  # and then the strategy, without blocks: what they need is loaded now
    train(Made(alone, adamw(alone), on_part(alone, lambda x: x), []), comm, 0, 1)
    del alone
    train(make(comm, 0), comm, 0, 1)
    comm.barrier()
    before = held()
    made = make(comm, BLOCKS)
    train(made, comm, 0, 2)
    comm.barrier()
    total = held() - before
    comm.barrier()
    parameters = tensor_bytes(made.model.parameters())
    state = tensor_bytes(state_tensors(made.optimizer))
    return {"parameters": parameters, "state": state, "rest": total - parameters - state}


@contextlib.contextmanager
def torchs_group(comm: dp.Communicator, folder: str) -> Iterator[Any]:
    """Of the backend "dpcore", and its communicator."""
    from dpcore.comm.launch.torch_backend import communicator_of

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of torch, about CPUs
    store = f"file://{Path(folder) / 'store'}"
    dist.init_process_group("dpcore", init_method=store, rank=comm.rank, world_size=RANKS)
    try:
        yield communicator_of(dist.group.WORLD)
    finally:
        comm.barrier()
        dist.destroy_process_group()


def weigh_one(comm: dp.Communicator, name: str, folder: str) -> dict[str, Any]:
    make, is_torchs = STRATEGIES[name]
    with torchs_group(comm, folder) as torchs:
        return weigh(make, torchs if is_torchs else comm)


def in_turns(
    comm: dp.Communicator, rounds: int, steps: int, folder: str
) -> dict[str, list[dict[str, Any]]]:
    """All strategies, again and again; of each, what every turn has found."""
    with torchs_group(comm, folder) as torchs:
        made = {
            name: make(torchs if is_torchs else comm, BLOCKS)
            for name, (make, is_torchs) in STRATEGIES.items()
        }
        names, found = list(made), {name: [] for name in made}
        for number in range(rounds + 1):
            at = number % len(names)
            for name in names[at:] + names[:at]:
                found[name].append(train(made[name], comm, number * (steps + 1), steps))
    return {name: turns[1:] for name, turns in found.items()}  # the first round touches memory


def on_ranks(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        return dp.spawn(function, RANKS, *arguments, folder, timeout=120)


def main() -> None:
    chosen = options(__doc__, "strategies")
    steps, rounds = (1, 1) if chosen.quick else (4, 6)
    mib: dict[str, dict[str, float]] = {}
    with progress(len(STRATEGIES) + 1, "strategies by weight, then by time") as done:
        for name in STRATEGIES:
            weights = on_ranks(weigh_one, name)
            mib[name] = {
                what: statistics.fmean(rank[what] for rank in weights) / 2**20
                for what in weights[0]
            }
            done()
        of_ranks = on_ranks(in_turns, rounds, steps)
        done()
    runs = {name: [of[name][-1] for of in of_ranks] for name in STRATEGIES}
    times = {
        name: [
            1e3 * max(turn["seconds"] for turn in turns)
            for turns in zip(*(of[name] for of in of_ranks), strict=True)
        ]
        for name in STRATEGIES
    }
    kept = {"parameters": "parameters", "state": "optimizer's state", "rest": "gradients and rest"}
    total = {name: sum(of.values()) for name, of in mib.items()}
    moved = {name: max(f["moved"] for f in found) / 2**20 for name, found in runs.items()}
    loss = {
        name: statistics.fmean(f["loss"] for f in found if f["loss"] is not None)
        for name, found in runs.items()
    }
    apart = max(loss.values()) - min(loss.values())
    if apart > 1e-3:
        sys.exit(f"these strategies train different models: {loss}")
    step_ms: dict[str, Spread] = {name: spread(found) for name, found in times.items()}
    rows = [
        {
            "strategy": name,
            "ms per step": step_ms[name].text(),
            "MiB moved per step": f"{moved[name]:.1f}",
            **{f"MiB of {text}": f"{mib[name][what]:.1f}" for what, text in kept.items()},
            "MiB in all": f"{total[name]:.1f}",
            "last loss": f"{loss[name]:.4f}",
        }
        for name in STRATEGIES
    ]
    figure, (left, right) = axes("a step of 2 ranks on one machine", "memory of a rank")
    names = list(STRATEGIES)
    places = range(len(names))
    ends = [[s.mean - s.low for s in step_ms.values()], [s.high - s.mean for s in step_ms.values()]]
    left.barh(places, [s.mean for s in step_ms.values()], xerr=ends, capsize=3, color=COLOURS[0])
    left.set(xlabel=f"ms, {over(rounds, 'turns')}")
    begin = [0.0] * len(names)
    for number, (what, text) in enumerate(kept.items()):
        widths = [max(0.0, mib[name][what]) for name in names]
        right.barh(places, widths, left=begin, color=COLOURS[number], label=text)
        begin = [a + b for a, b in zip(begin, widths, strict=True)]
    right.set(xlabel="MiB between two steps")
    right.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=3)
    for plot in (left, right):
        plot.set_yticks(places, names)
        plot.invert_yaxis()
        plot.grid(axis="y", visible=False)
    share = {name: of / total["data parallel"] for name, of in total.items()}
    said = [
        f"Of the memory of data parallel training, zero1 keeps {share['zero1']:.2f}, zero2 "
        f"{share['zero2']:.2f}, FSDP2 {share['FSDP2']:.2f}, tensor parallel "
        f"{share['tensor parallel']:.2f} and a pipeline {share['pipeline']:.2f}, with {RANKS} "
        f"ranks. The last losses differ by {apart:.1e}.",
        "What is moved is what a rank sends, or reads and writes in memory of the other one; on "
        "one machine that costs little. Over a network it decides: see speed_up.py.",
    ]
    facts = {
        "strategies": [
            {
                "strategy": name,
                "step_ms": step_ms[name]._asdict(),
                "mib": {**mib[name], "moved": moved[name]},
                "loss": loss[name],
            }
            for name in names
        ]
    }
    finish(chosen, rows, figure, facts, said)


if __name__ == "__main__":
    main()
