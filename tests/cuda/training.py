"""A training that is the same in one process and over ranks, in float64."""

import torch
from torch import nn

import dpcore
from tests.cuda.on_gpu import settle


def small_model():
    torch.manual_seed(0)
    with torch.device("cpu"):
        layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8))
    return layers.double().cuda()


def inputs():
    with torch.device("cpu"):
        return torch.arange(32.0 * 64).view(32, 64).double() / 2048


def train_part(comm):
    """A rank's part of it, with DataParallel over the communicator."""
    part = inputs().chunk(comm.world_size)[comm.rank]
    return train(small_model(), part, lambda module: dpcore.DataParallel(module, comm=comm))


def train(module, part, wrap):
    """The parameters after some steps of the wrapped module on a rank's part of the inputs."""
    model = wrap(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        model(part.cuda()).square().mean().backward()
        optimizer.step()
    settle()
    return torch.cat([p.detach().flatten().cpu() for p in module.parameters()])
