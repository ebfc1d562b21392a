"""torch's own ways to share a model, over the backend "dpcore": each against one process."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.experimental import context_parallel

from benchmarks.harness.torch_strategies import (
    AVERAGED_EVERY,
    POST_LOCAL,
    STRATEGIES,
    UNTIL_LOCAL,
    Sizes,
    batch_of,
    each_layer,
    grid_over,
    loss_of,
    model_of,
    sgd,
    shared_by_columns_and_rows,
    whole,
)
from dpcore.comm.launch.torch_backend import communicator_of
from tests.ranks.groups import in_group

STEPS = 1 + UNTIL_LOCAL + AVERAGED_EVERY  # the last one averages what is local
CLOSE = {"rtol": 1e-12, "atol": 1e-12}
SMALL = Sizes()


def alone(unchanged):
    """One process: the weights after all steps of which the first ones update nothing."""
    module = model_of(SMALL)
    optimizer = sgd(module.parameters())
    for step in range(unchanged, STEPS):
        inputs, targets = batch_of(SMALL, step)
        optimizer.zero_grad()
        loss_of(module(inputs), targets).backward()
        optimizer.step()
    return whole(module)


def alone_but_local(world):
    """The same for ranks whose updates are their own, and averaged now and then."""
    modules = [model_of(SMALL) for _ in range(world)]
    optimizers = [sgd(module.parameters()) for module in modules]
    for step in range(STEPS):
        batch = zip(*(part.chunk(world) for part in batch_of(SMALL, step)), strict=True)
        for module, (inputs, targets) in zip(modules, batch, strict=True):
            module.zero_grad()
            loss_of(module(inputs), targets).backward()
        alike = list(zip(*(module.parameters() for module in modules), strict=True))
        if step < UNTIL_LOCAL:
            for of_ranks in alike:
                average([parameter.grad for parameter in of_ranks])
        for optimizer in optimizers:
            optimizer.step()
        if step >= UNTIL_LOCAL and (step - UNTIL_LOCAL) % AVERAGED_EVERY == 0:
            for of_ranks in alike:
                average([parameter.data for parameter in of_ranks])
    return whole(modules[0])


def average(tensors):
    mean = torch.stack(tensors).mean(0)
    for tensor in tensors:
        tensor.copy_(mean)


def has_moved(mesh):
    """Whether anything went through the groups of a mesh that have several ranks."""
    groups = [mesh.get_group(axis) for axis in mesh.mesh_dim_names]
    groups = [group for group in groups if group.size() > 1]
    if (place := torch.get_default_device()).type != "cpu":
        return any(group._get_backend(place).device_libraries() for group in groups)
    of_groups = [communicator_of(group).stats() for group in groups]
    messages = sum(sum(stats["sent"].values()) for stats in of_groups)
    calls = [call for stats in of_groups for call in stats.values() if isinstance(call, dict)]
    paths = [path for call in calls for path in call.values() if isinstance(path, dict)]
    return messages + sum(path["operations"] for path in paths) > 0


def check(name, world):
    """Trains; the names of the parameters that this rank has found to be those of one process."""
    trainer = STRATEGIES[name](grid_over("dpcore", world), SMALL)
    for step in range(STEPS):
        trainer.step(*batch_of(SMALL, step))
    wanted = alone_but_local(world) if name == POST_LOCAL else alone(trainer.unchanged)
    found = trainer.weights()
    for parameter, value in found.items():
        torch.testing.assert_close(value, wanted[parameter], **CLOSE, msg=f"{name}: {parameter}")
    assert has_moved(trainer.mesh), f"{name}: nothing went through dpcore"
    return set(found)


def check_each(names):
    """The names of the parameters that this rank has compared, by strategy."""
    found = {}
    for name in names:
        try:
            found[name] = check(name, dist.get_world_size())
        except Exception as error:
            raise AssertionError(f"{name} on rank {dist.get_rank()}") from error
    return found


def assert_each_has_compared_everything(of_ranks):
    everything = set(model_of(SMALL).state_dict())
    for name in of_ranks[0]:
        assert set().union(*(found[name] for found in of_ranks)) == everything, name


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("world", [2, 4])
def test_each_is_one_process(world):
    """All in one group of processes: to start one takes longer than to train a few steps."""
    assert_each_has_compared_everything(in_group(check_each, world, list(STRATEGIES)))


@pytest.mark.filterwarnings("ignore")
def test_context_parallel_has_no_path_on_the_cpu():
    """As docs/torch_distributed.md says. Should this fail, torch has got one: test it, too."""

    def body():
        mesh = grid_over("dpcore", 2)(ring=2)
        q, k, v = torch.randn(3, 1, 2, 8, 4)
        cut = context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2])
        with cut, pytest.raises(NotImplementedError, match="flash_attention_for_cpu"):
            torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)  # patched

    in_group(body, 2)


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_of_sharded_tensors_is_read_by_another_number_of_ranks(tmp_path):
    """Written by 2 x 2 ranks that share parameters by data and by tensor; read by two ranks that
    share them by tensor, and by two that share them by data."""

    def shared(**axes):
        mesh, module = grid_over("dpcore", dist.get_world_size())(**axes), model_of(SMALL)
        if "tensor" in axes:
            shared_by_columns_and_rows(module, mesh["tensor"], output_layouts=Replicate())
        if "data" in axes:
            each_layer(fully_shard, module, mesh["data"])
        return module

    def write():
        module = shared(data=2, tensor=2)
        torch.nn.init.constant_(module[3].norm.bias, 7.0)
        checkpoint.save({"model": module.state_dict()}, checkpoint_id=tmp_path)
        return whole(module)

    def read():
        found = []
        for axes in ({"tensor": 2}, {"data": 2}):
            module = shared(**axes)
            for parameter in module.parameters():
                nn.init.zeros_(parameter)
            state = {"model": module.state_dict()}
            checkpoint.load(state, checkpoint_id=tmp_path)
            module.load_state_dict(state["model"])
            found.append(whole(module))
        return found

    wanted = in_group(write, 4)[0]
    assert wanted["3.norm.bias"].unique().tolist() == [7.0]
    for found in itertools.chain(*in_group(read, 2)):
        assert found.keys() == wanted.keys()
        for name, value in found.items():
            assert torch.equal(value, wanted[name]), name
