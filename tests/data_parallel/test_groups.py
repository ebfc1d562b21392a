"""With whom gradients are averaged: groups of torch, ours in the place of Gloo, any other."""

import subprocess
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dpcore
from tests.data_parallel.models import (
    OPTIMIZERS,
    Small,
    assert_same_values,
    batch,
    part,
    train,
    train_alone,
)
from tests.ranks import python
from tests.ranks.groups import in_group

# No communicator of ours by default, and as patient as torch is unless told otherwise.
over_gloo = partial(in_group, backend="gloo", timeout=1800.0)


def train_as_torch_scripts_do(wrap, **options):
    """A script for torch DDP; `wrap` is what its import says."""
    model = wrap(Small(seed=7 + dist.get_rank()), **options)
    optimizer = OPTIMIZERS["momentum"]([p for p in model.parameters() if p.requires_grad])
    for step in range(4):
        x, y = (t.chunk(dist.get_world_size())[dist.get_rank()] for t in batch(step))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return model


def test_a_gloo_script_that_changes_only_the_import_runs_on_our_core():
    def body():
        reference = train_as_torch_scripts_do(nn.parallel.DistributedDataParallel)
        model = train_as_torch_scripts_do(dpcore.DataParallel)
        second = train_as_torch_scripts_do(dpcore.DataParallel)
        assert second.group is model.group  # one per process group
        assert_same_values(model.module, reference.module)
        return model.stats()

    for stats in over_gloo(body, 2):
        assert stats["backend"] == "native"
        assert sum(path["operations"] for path in stats["all_reduce"].values()) >= 4


@pytest.mark.parametrize("named", (None, "cpu:gloo", "cpu:gloo,cuda:gloo"))
def test_gloo_under_other_names(named):
    """As torch chooses it without a name, and for a device."""

    def body():
        assert dist.get_backend() != "gloo"
        model = dpcore.DataParallel(nn.Linear(2, 1))
        assert model._profiled_backend == "gloo"  # as torch's profiler calls its operations
        return model.backend

    assert over_gloo(body, 2, backend=named) == ["native"] * 2


def trained_in_subgroups():
    """Of three ranks, the first and the last are one group."""
    pairs = [dist.new_group([0, 2]), dist.new_group([1])]
    mine = pairs[dist.get_rank() % 2]
    model = dpcore.DataParallel(nn.Linear(2, 1), process_group=mine)
    model(torch.full((1, 2), float(dist.get_rank()))).sum().backward()
    assert model.module.weight.grad.tolist() == [[1.0, 1.0]]
    return model.backend, model.group.transport


def test_means_of_large_half_precision_gradients_over_gloo():
    """Their sum would be too large for the type."""

    def body():
        net = nn.Linear(8, 1, bias=False).half()
        model = dpcore.DataParallel(net, comm=dist.group.WORLD)
        (model(torch.ones(1, 8, dtype=torch.float16)) * 60000.0).sum().backward()
        return net.weight.grad.unique().tolist()

    assert over_gloo(body, 2) == [[60000.0]] * 2


def test_a_subgroup_of_gloo():
    assert over_gloo(trained_in_subgroups, 3) == [("native", "shm")] * 3


@pytest.mark.parametrize("schedule", ("bucketed", "sequential", "per_parameter"))
def test_the_group_of_torch_itself(schedule):
    """As `comm=`, a process group is used as it is."""

    def body():
        model = train_as_torch_scripts_do(
            dpcore.DataParallel, comm=dist.group.WORLD, schedule=schedule, bucket_cap_mb=0.01
        )
        reference = train_alone(OPTIMIZERS["momentum"], steps=4)
        assert_same_values(model.module, reference)
        assert model.bucket_report().rebuilt
        return model.stats()

    none = dict.fromkeys(("launches", "together", "born", "moved"), 0)
    copies = {**none, "alone": 4 * 8}  # one per gradient and step
    stats = {"backend": "torch gloo", "schedule": schedule, "chosen": {}, "copies": copies}
    assert over_gloo(body, 2) == [stats] * 2


def test_deterministic_needs_our_communicator():
    def body():
        with pytest.raises(dpcore.Unsupported, match="in what order torch gloo adds"):
            dpcore.DataParallel(nn.Linear(2, 1), comm=dist.group.WORLD, deterministic=True)

    over_gloo(body, 1)


class Counting:
    """A communicator of somebody else, with what DataParallel needs of one."""

    def __init__(self, comm):
        self._comm = comm
        self.rank, self.world_size = comm.rank, comm.world_size
        self.calls = []

    def all_reduce(self, tensor, op, *, async_op):
        self.calls.append((op, tensor.numel()))
        return self._comm.all_reduce(tensor, op, async_op=async_op)

    def broadcast(self, tensor, root):
        self._comm.broadcast(tensor, root)

    def all_gather(self, output, input, *, sizes=None):
        self._comm.all_gather(output, input, sizes=sizes)


def test_anything_that_can_average():
    def body(comm):
        other = Counting(comm)
        model = dpcore.DataParallel(Small(seed=7 + comm.rank), comm=other, bucket_cap_mb=0.01)
        for step in range(3):
            x, y = (part(tensor, comm) for tensor in batch(step))
            model.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
        assert model.backend == "Counting"
        return other.calls

    calls, *others = dpcore.spawn(body, 3, mode="threads")
    assert all(other == calls for other in others)
    assert {op for op, _ in calls} == {"mean"}
    assert len(calls) >= 3


def test_the_groups_own_timeout_is_kept():
    from datetime import timedelta

    from dpcore.ddp.wrapper.gradient_group import _timeout_of

    def body():
        assert _timeout_of(dist.group.WORLD) >= timedelta(minutes=10)

    over_gloo(body, 1)


def test_ranks_train_alike_in_an_arena_and_out_of_it():
    def body(comm):
        inside = train(comm, OPTIMIZERS["sgd"], model=Small())
        outside = train(Counting(comm), OPTIMIZERS["sgd"], model=Small())
        assert_same_values(inside.module, outside.module)

    dpcore.spawn(body, 2, mode="threads")


GONE = """
import os, sys, torch, torch.distributed as dist
import dpcore

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=sys.argv[2], rank=rank, world_size=2)
module = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
model = dpcore.DataParallel(module, comm=dist.group.WORLD, schedule="priority")
optimizer = dpcore.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
for step in range(4):
    if rank == 1 and step == 3:
        os._exit(0)
    for attempt in range(3 if step == 3 else 1):
        try:
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            model.flush()
        except (RuntimeError, dpcore.Error) as error:
            print(type(error).__name__)
del model, optimizer
print("end")
"""


def test_a_wait_for_a_rank_that_is_gone_fails_each_time(tmp_path):
    """With a schedule whose bucket is awaited again: after an error, and when the model ends."""
    started = [
        python.start(
            "-c", GONE, str(rank), f"file://{tmp_path / 'store'}",
            text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    out, err = started[0].communicate(timeout=60)
    started[1].communicate(timeout=60)
    assert started[0].returncode == 0, err
    assert len(out.split()) == 4 and out.endswith("end\n"), out
