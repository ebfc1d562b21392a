"""Trains on several machines, started by Open MPI, whose variables say which rank this is.

mpirun -np 2 python examples/scripts/under_mpirun.py
mpirun -np 16 -hostfile hosts -x MASTER_ADDR=node0 python examples/scripts/under_mpirun.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def join():
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    world_size = int(os.environ["OMPI_COMM_WORLD_SIZE"])
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29511")
    dist.init_process_group("gloo", init_method="env://", rank=rank, world_size=world_size)
    return rank, world_size


def points(count, seed):
    """Two spirals that wind around each other."""
    generator = torch.Generator().manual_seed(seed)
    turn = 4 * torch.rand(count, generator=generator) + 0.5
    y = torch.randint(0, 2, (count,), generator=generator)
    angle = turn + torch.pi * y
    x = torch.stack([turn * angle.cos(), turn * angle.sin()], 1)
    return TensorDataset(x + 0.1 * torch.randn(count, 2, generator=generator), y)


def train(rank, world_size, epochs=20):
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2)
    )
    model = DistributedDataParallel(network)
    data = points(512, seed=1)
    sampler = DistributedSampler(data, num_replicas=world_size, rank=rank, shuffle=True)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return network


def main():
    rank, world_size = join()
    network = train(rank, world_size)
    x, y = points(512, seed=2).tensors
    mine = slice(rank, None, world_size)
    correct = (network(x[mine]).argmax(1) == y[mine]).sum()
    dist.all_reduce(correct)
    if rank == 0:
        print(f"{world_size} ranks: accuracy {correct.item() / len(y):.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
