"""A rank is killed in the middle of training, and the others go on.

    python examples/elastic.py [ranks]

Each rank is started by itself, because torchrun and dpcore.spawn end the others when one dies.
"""

import multiprocessing
import os
import signal
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import dpcore as dp

EPOCHS = 4
VICTIM, DIES_AT = 1, 10  # after so many steps


def train(rank: int, world_size: int, job: str) -> None:
    comm = dp.init(rank=rank, world_size=world_size, init_method=job)
    torch.manual_seed(0)
    x = torch.rand(960, 2) * 2 - 1
    data = TensorDataset(x, x.sum(1, keepdim=True).sin())
    sampler: DistributedSampler[torch.Tensor] = DistributedSampler(data, comm.world_size, comm.rank)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    model = dp.DataParallel(nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with dp.elastic(model, optimizer, sampler) as run:
        for epoch in range(EPOCHS):
            sampler.set_epoch(epoch)
            for inputs, targets in run.batches(loader):
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(inputs), targets)
                if rank == VICTIM and run.step == DIES_AT:
                    os.kill(os.getpid(), signal.SIGKILL)
                loss.backward()
                optimizer.step()
    dp.check(model, optimizer, comm=run.comm).raise_if_different()
    if run.comm.rank == 0:
        ranks = ", ".join(map(str, run.ranks))
        print(f"{run.step} steps, the last on ranks {ranks} with equal weights: loss {loss:.4f}")
    dp.finalize()


def main() -> None:
    world_size = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    context = multiprocessing.get_context("spawn")
    arguments = [(rank, world_size, f"elastic-{os.getpid()}") for rank in range(world_size)]
    ranks = [context.Process(target=train, args=each) for each in arguments]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join()


if __name__ == "__main__":
    main()
