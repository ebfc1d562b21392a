"""Training over the backend "dpcore" on tensors of a device: torch's DistributedDataParallel over
it, and dpcore's own, which takes a part of the group."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dpcore
from dpcore.ddp.wrapper.gradient_group import of_process_group
from tests.ranks.devices import calls
from tests.ranks.groups import in_group

pytestmark = pytest.mark.usefixtures("fake")


def small_model():
    module = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 3)).double()
    generator = torch.Generator().manual_seed(0)  # torch's own is shared by ranks that are threads
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
    return module


def train(wrap, share):
    module = small_model()
    model = wrap(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    inputs = torch.arange(24.0 * 8, dtype=torch.float64).view(24, 8).sin()
    for step in range(4):
        optimizer.zero_grad()
        model(share(inputs) + step).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in module.parameters()])


WRAPS = {
    "torch": partial(nn.parallel.DistributedDataParallel, bucket_cap_mb=0.0005),
    "dpcore": partial(dpcore.DataParallel, bucket_cap_mb=0.0005),
}


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("cuda", ["nccl", "cuda"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_training_with_several_ranks_is_training_in_one_process(world, cuda, wrap, fake):
    def body():
        rank, size = dist.get_rank(), dist.get_world_size()
        return train(WRAPS[wrap], lambda inputs: inputs.chunk(size)[rank])

    alone = train(lambda module: module, lambda inputs: inputs)
    for parameters in in_group(body, world, device=cuda):
        assert torch.allclose(parameters, alone, rtol=1e-10)
    reductions = [call for call in calls(fake) if call.startswith("AllReduce")]
    if cuda == "nccl":
        buckets = 1 if wrap == "torch" else 2  # torch's first one is never smaller than 1 MiB
        assert len(reductions) >= 4 * buckets, "gradients went another way"
        assert [call for call in calls(fake) if call.startswith("CommRegister")], "plain buckets"
    else:
        assert not reductions


def test_a_model_that_fails_leaves_the_group_to_the_program():
    def body():
        group, cpu = dist.group.WORLD, torch.device("cpu")
        first = of_process_group(group, cpu)
        assert first.backend == "nccl" and of_process_group(group, cpu) is first
        if dist.get_rank() == 0:
            first.abort("no more money")
        with pytest.raises(dpcore.PeerLost, match="no more money"):
            first.all_reduce(torch.ones(1))
            first.barrier()
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == 2
        second = of_process_group(group, cpu)
        second.all_reduce(tensor)
        assert tensor.item() == 4

    in_group(body, 2, device="nccl")
