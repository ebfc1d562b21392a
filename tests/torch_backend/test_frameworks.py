"""What is built on torch.distributed, over the backend "dpcore": each against one process."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.ranks.groups import in_group

STEPS = 3


def model():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))


def batch(step, world):
    """As many rows as ranks and a power of two: the mean is exact."""
    return torch.randn(4 * world, 6, generator=torch.Generator().manual_seed(step))


def train(wrapped, optimizer, rows):
    for step in range(STEPS):
        optimizer.zero_grad()
        wrapped(rows(step)).square().mean().backward()
        optimizer.step()


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def alone(world):
    reference = model()
    train(reference, sgd(reference), lambda step: batch(step, world))
    return reference


def own_rows(step):
    return batch(step, dist.get_world_size()).chunk(dist.get_world_size())[dist.get_rank()]


def assert_close(module, reference, **tolerance):
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(module[name], value, **tolerance)


def data_parallel():
    reference = alone(dist.get_world_size())
    for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}):
        wrapped = DistributedDataParallel(model(), bucket_cap_mb=0.0005, **options)
        train(wrapped, sgd(wrapped), own_rows)
        assert_close(wrapped.module.state_dict(), reference)


def buckets_in_the_arena():
    """They are what torch's DDP allocates through the backend."""
    from dpcore.comm.launch.torch_backend import communicator_of

    def pushes():
        paths = communicator_of(dist.group.WORLD).stats()["all_reduce"]
        return paths.get("two_shot/push", {"operations": 0})["operations"]

    before = pushes()
    wrapped = DistributedDataParallel(nn.Linear(100, 100))
    for _ in range(3):
        wrapped(torch.ones(2, 100)).sum().backward()
    assert pushes() - before == 3


def hooks():
    """All that torch has for the CPU; those that quantize fail over Gloo as well."""
    reference = alone(dist.get_world_size())
    exact, rough = {"rtol": 1e-5, "atol": 1e-6}, {"rtol": 0.1, "atol": 0.02}
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, matrix_approximation_rank=4)
    local = post_localSGD_hook.PostLocalSGDState(None, None, start_localSGD_iter=100)
    for hook, hook_state, tolerance in (
        (default_hooks.allreduce_hook, None, exact),
        (default_hooks.fp16_compress_hook, None, rough),
        (post_localSGD_hook.post_localSGD_hook, local, exact),
        (powerSGD_hook.powerSGD_hook, state, rough),
    ):
        wrapped = DistributedDataParallel(model())
        wrapped.register_comm_hook(hook_state, hook)
        train(wrapped, sgd(wrapped), own_rows)
        assert_close(wrapped.module.state_dict(), reference, **tolerance)
    for builtin in (dist.BuiltinCommHookType.ALLREDUCE, dist.BuiltinCommHookType.FP16_COMPRESS):
        wrapped = DistributedDataParallel(model())
        wrapped._register_builtin_comm_hook(builtin)
        train(wrapped, sgd(wrapped), own_rows)
        assert_close(wrapped.module.state_dict(), reference, **rough)


def uneven_inputs():
    rank, world = dist.get_rank(), dist.get_world_size()
    wrapped = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    with torch.no_grad():
        wrapped.module.weight.fill_(1)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=1.0)
    with Join([wrapped], divide_by_initial_world_size=True):
        for _ in range(rank + 1):
            optimizer.zero_grad()
            wrapped(torch.ones(1, 1)).sum().backward()
            optimizer.step()
    # Step k has world - k ranks with a gradient of one.
    wanted = 1 - sum((world - step) / world for step in range(world))
    torch.testing.assert_close(wrapped.module.weight.item(), wanted)


def fsdp1():
    reference = alone(dist.get_world_size())
    wrapped = FullyShardedDataParallel(model(), use_orig_params=True, device_id=torch.device("cpu"))
    train(wrapped, sgd(wrapped), own_rows)
    with FullyShardedDataParallel.summon_full_params(wrapped):
        full = {k.replace("_fsdp_wrapped_module.", ""): v for k, v in wrapped.state_dict().items()}
        assert_close(full, reference)


def fsdp2():
    reference = alone(dist.get_world_size())
    sharded = model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in sharded:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    train(sharded, sgd(sharded), own_rows)
    assert_close({k: v.full_tensor() for k, v in sharded.state_dict().items()}, reference)


def zero_redundancy():
    reference = alone(dist.get_world_size())
    wrapped = DistributedDataParallel(model())
    optimizer = ZeroRedundancyOptimizer(
        wrapped.parameters(), optimizer_class=torch.optim.SGD, lr=0.1, momentum=0.9
    )
    train(wrapped, optimizer, own_rows)
    assert_close(wrapped.module.state_dict(), reference)
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        assert len(optimizer.state_dict()["state"]) == 4


def distributed_tensors():
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    left = torch.arange(float(4 * world * 6)).reshape(4 * world, 6)
    right = torch.arange(12.0).reshape(6, 2)
    rows = distribute_tensor(left, mesh, [Shard(0)])
    product = rows @ distribute_tensor(right, mesh, [Replicate()])
    assert torch.equal(product.full_tensor(), left @ right)
    columns = rows.redistribute(mesh, [Shard(1)])
    assert torch.equal(columns.full_tensor(), left)
    assert columns.to_local().shape[1] <= 6 // world + 1
    partial = DTensor.from_local(torch.ones(3), mesh, [Replicate()])
    assert torch.equal((partial * 2).full_tensor(), torch.full((3,), 2.0))


def checkpoints(folder):
    sharded = model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(sharded, mesh=mesh)
    saved = {k: v.full_tensor().clone() for k, v in sharded.state_dict().items()}
    checkpoint.save({"model": sharded.state_dict()}, checkpoint_id=folder)
    with torch.no_grad():
        for parameter in sharded.parameters():
            parameter.zero_()
    state = {"model": sharded.state_dict()}
    checkpoint.load(state, checkpoint_id=folder)
    for name, value in state["model"].items():
        assert torch.equal(value.full_tensor(), saved[name])


def lightning_logs():
    """What its Trainer calls for ``self.log(..., sync_dist=True)``; counts are integers."""
    from lightning.fabric.utilities.distributed import _sync_ddp

    rank, world = dist.get_rank(), dist.get_world_size()
    for dtype in (torch.int64, torch.int32, torch.float32):
        mean = _sync_ddp(torch.tensor(10 * rank + 4, dtype=dtype), reduce_op="mean")
        assert mean.dtype == dtype and mean.item() == 5 * (world - 1) + 4
    assert _sync_ddp(torch.tensor(rank - 3), reduce_op="avg").item() == -2  # -5 / 2
    assert _sync_ddp(torch.tensor(rank), reduce_op="sum").item() == sum(range(world))


CHECKS = (
    lightning_logs,
    data_parallel,
    buckets_in_the_arena,
    hooks,
    uneven_inputs,
    fsdp1,
    fsdp2,
    zero_redundancy,
    distributed_tensors,
)


@pytest.mark.filterwarnings("ignore")
def test_frameworks(tmp_path):
    """In one pair of processes: loading what they import takes longer than the checks."""

    def body(folder):
        for check in (*CHECKS, lambda: checkpoints(folder)):
            try:
                check()
            except Exception as error:
                raise AssertionError(f"{check.__name__} on rank {dist.get_rank()}") from error

    in_group(body, 2, str(tmp_path / "checkpoint"))


@pytest.mark.filterwarnings("ignore")
def test_two_dimensions():
    """Tensor parallel in pairs, data parallel between the pairs, by hand on both axes."""

    def body():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        reference, sharded = model(), model()
        for layer in sharded:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh["data"])
        fully_shard(sharded, mesh=mesh["data"])
        rows = batch(0, 4)
        reference(rows).square().mean().backward()
        own = rows.chunk(2)[mesh.get_local_rank("data")]
        sharded(own).square().mean().backward()
        for got, wanted in zip(sharded.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(got.grad.full_tensor(), wanted.grad)
        weight = copy.deepcopy(reference[0].weight.detach())
        split = distribute_tensor(weight, mesh["tensor"], [Shard(0)])
        assert torch.equal(split.full_tensor(), weight)

    in_group(body, 4)
