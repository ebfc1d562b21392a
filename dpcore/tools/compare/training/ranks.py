"""A rank that trains several contenders in turn, and what is computed from all ranks' figures.

A step is zero_grad, forward and backward. Each rank holds the model once per contender and runs
them in turn, a few steps each, again and again, so that a slow minute of the machine falls on all
alike. Optimizers are left out: they cost everybody the same.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

# Before there is a group: its functions take the group of that moment as the default of an argument
# and never let go of it. A Gloo group that outlives destroy_process_group() keeps its threads, and
# one that frees a tensor while Python ends aborts the process.
import torch.distributed.nn

import dpcore as dp
from dpcore._autoload import register
from dpcore.base.user_code import loaded, names_code
from dpcore.ddp.wrapper import launch_schedule
from dpcore.errors import Error
from dpcore.reference.ladder import LADDER
from dpcore.reference.launches import ACROSS_STEPS
from dpcore.tools.compare.training.making import loss_in, made
from dpcore.tools.ratios import in_turn, of_slowest_rank

DEFAULT = "dpcore"  # `DataParallel(model)`, nothing else
TORCH = "torch"
ALONE = "alone"  # no communication, all ranks computing at once: what is subtracted
ALONE_WARM = "alone warm"  # the same with dp.warm_memory()
COPIED = "dpcore copied"  # no gradient is made in its bucket
OVER_DPCORE = "torch/dpcore"  # torch DDP, with our backend in the place of Gloo
OVER_GLOO = "dpcore/gloo"  # DataParallel over torch's group, as it is
STEPS_OF_THE_LADDER = {cls.__name__: cls for cls in LADDER}
TORCH_OVER_OURS = "torch over ours"  # where Gloo cannot go, as on a paced link
TRACED = " traced"  # behind a contender's name: the same while a trace records
WARM_STEPS = 3  # the first ones rebuild buckets and touch memory
SETTLING_STEPS = 28  # the most until the default has chosen its schedule

Times = dict[str, list[float]]
T = TypeVar("T")


def kind_and_cap(name: str) -> tuple[str, dict[str, Any]]:
    """What a contender is, and its size of buckets: MiB, or auto behind a schedule."""
    pattern = r"(.+?)(?: ([0-9.]+|(?<=bucketed )auto))?"
    found = re.fullmatch(pattern, name.removesuffix(TRACED))
    assert found is not None
    kind, size = found.groups()
    return kind, {} if size is None else {"bucket_cap_mb": size if size == "auto" else float(size)}


def warm_steps(name: str, world: int) -> int:
    """How many steps of a contender are not like the others. One rank has no schedule to choose."""
    chooses = world > 1 and kind_and_cap(name)[0] in (DEFAULT, COPIED, "dpcore auto")
    return SETTLING_STEPS if chooses else WARM_STEPS


def goes_across_steps(name: str) -> bool:
    """Whether a contender needs ``dp.DistributedOptimizer``, and leaves a step in flight."""
    kind = kind_and_cap(name)[0]
    schedule = kind.removeprefix("dpcore ")
    if kind != schedule and names_code(schedule):
        return launch_schedule.goes_across_steps(schedule_of(schedule))
    return schedule in ACROSS_STEPS


def updates_parts(name: str) -> bool:
    """Whether each rank steps a part of the parameters, of a contender that goes across steps."""
    schedule = kind_and_cap(name)[0].removeprefix("dpcore ")
    if not names_code(schedule):
        return schedule in ("zero1", "zero2")
    return list(schedule_of(schedule).phases())[-1:] == ["all_gather"]


def wrapped(name: str, model: torch.nn.Module, comm: Any, **options: Any) -> Any:
    """The model as the contender trains it. Options are those that both wrappers have."""
    kind, cap = kind_and_cap(name)
    if kind in (ALONE, ALONE_WARM):
        return model
    if kind == COPIED:
        return dp.DataParallel(model, comm=comm, gradients="copied", **cap, **options)
    if kind in (DEFAULT, OVER_GLOO):
        group = dist.group.WORLD if kind == OVER_GLOO else comm
        return dp.DataParallel(model, comm=group, **options)
    if kind in (TORCH, OVER_DPCORE, TORCH_OVER_OURS):
        ddp = torch_ddp(name, model, **options)
        if kind == TORCH_OVER_OURS:
            ddp.register_comm_hook(comm, average_by_ours)
        return ddp
    if kind in STEPS_OF_THE_LADDER:
        return STEPS_OF_THE_LADDER[kind](model, comm, **cap)
    schedule: Any = kind.removeprefix("dpcore ")
    if names_code(schedule):
        schedule = schedule_of(schedule)
    return dp.DataParallel(model, comm=comm, schedule=schedule, **cap, **options)


def schedule_of(name: str) -> Any:
    """The launch schedule that ``file.py:MySchedule`` names: an instance, or a class of them."""
    found = loaded(name, "MySchedule")
    schedule = found() if isinstance(found, type) else found
    if not isinstance(schedule, dp.LaunchSchedule):
        raise Error(f"{name} is not a dpcore.LaunchSchedule but a {type(schedule).__name__}")
    return schedule


def torch_ddp(
    name: str, model: torch.nn.Module, **more: Any
) -> torch.nn.parallel.DistributedDataParallel:
    """A contender of torch's without a hook: it takes one only."""
    kind, cap = kind_and_cap(name)
    group = {"process_group": dist.new_group(backend="dpcore")} if kind == OVER_DPCORE else {}
    options: dict[str, Any] = cap | group | more | {"gradient_as_bucket_view": True}
    return torch.nn.parallel.DistributedDataParallel(model, **options)


# torch compares the annotations of a hook as objects, and finds text where this module has them.
def average_by_ours(comm, bucket):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN201
    """For torch DDP: its reducer and its buckets, over a communicator of ours."""
    buffer = bucket.buffer()
    sent = comm.all_reduce(buffer, "mean", async_op=True).get_future()
    return sent.then(lambda _: buffer)


def step_of(name: str, model_name: str, comm: Any) -> Callable[[], None]:
    own = made(model_name, comm.rank, comm.world_size)
    model = wrapped(name, own.module, comm)
    finish = getattr(model, "finish", None)
    memory = dp.warm_memory if kind_and_cap(name)[0] == ALONE_WARM else contextlib.nullcontext

    def step() -> None:
        with memory():
            own.module.zero_grad()
            loss = loss_in(own.run(model))
            if loss is not None:  # else the step has called backward
                torch.autograd.backward(loss)
            if finish is not None:
                finish()

    return step


def beside_gloo(function: Callable[..., T]) -> Callable[..., T]:
    """Gives `function(comm, ..., folder)` torch's group beside ours, for torch DDP.

    The models of the call are gone before the group is. A DDP that is the last to hold a Gloo group
    joins the group's thread under Python's lock, and that thread waits for the lock to free what a
    work has kept."""

    @functools.wraps(function)
    def called(comm: Any, *arguments: Any, **named: Any) -> T:
        folder = named["folder"] if "folder" in named else arguments[-1]
        register()
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=comm.rank,
            world_size=comm.world_size,
        )
        try:
            return function(comm, *arguments, **named)
        finally:
            gc.collect()
            comm.barrier()
            dist.destroy_process_group()

    return called


@beside_gloo
def measure(
    comm: Any, model: str, contenders: Sequence[str], rounds: int, seconds: float, folder: str
) -> Times:
    """On a rank: seconds per step, per contender and round."""
    torch.manual_seed(comm.rank)
    steps = {name: step_of(name, model, comm) for name in contenders}
    for name in contenders:
        for _ in range(warm_steps(name, comm.world_size)):
            steps[name]()
    count = steps_in(seconds, steps[contenders[0]], comm)
    times: Times = {name: [] for name in contenders}
    for number in range(rounds):
        for name in in_turn(contenders, number):
            comm.barrier()
            with dp.trace(comm=comm) if name.endswith(TRACED) else contextlib.nullcontext():
                begin = time.perf_counter()
                for _ in range(count):
                    steps[name]()
                times[name].append((time.perf_counter() - begin) / count)
    return times


def steps_in(seconds: float, step: Callable[[], Any], comm: Any) -> int:
    """How many steps take so long on the slowest rank: the same number on all.

    Quick ones are tried more often: the first has to wait for the other ranks to come."""
    count, taken = 1, 0.0
    while taken < seconds / 10:
        count *= 4 if taken else 1
        begin = time.perf_counter()
        for _ in range(count):
            step()
        slowest = torch.tensor([time.perf_counter() - begin])
        comm.all_reduce(slowest, op="max")
        taken = float(slowest)
    return max(1, round(seconds / taken * count))


def spawn(function: Callable[..., Any], world: int, *arguments: Any, **options: Any) -> list[Any]:
    """Runs `function(comm, *arguments, folder)` on every rank. Options are those of `init`."""
    with tempfile.TemporaryDirectory(prefix="dpcore-") as folder:
        return dp.spawn(function, world, *arguments, str(Path(folder)), timeout=300, **options)


def of_slowest(times: Sequence[Times]) -> Times:
    """Per contender and round the rank that took longest."""
    return {name: of_slowest_rank(t[name] for t in times) for name in times[0]}


def overheads(rounds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Median over rounds of a contender's step minus that of `alone` in the same round."""
    return {
        name: statistics.median(
            mine - base for mine, base in zip(times, rounds[ALONE], strict=True)
        )
        for name, times in rounds.items()
    }
