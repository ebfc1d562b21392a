"""Trains a small convolutional network on processes of one machine, with torch DDP over Gloo.

torchrun --standalone --nproc-per-node 2 examples/scripts/cpu_processes.py
"""

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

EPOCHS, BATCH = 3, 16


def images(count, seed):
    """Black squares in one of four corners, in noise."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (count,), generator=generator)
    x = 0.5 * torch.randn(count, 1, 8, 8, generator=generator)
    for image, corner in zip(x, y.tolist(), strict=True):
        image[0, 4 * (corner // 2) : 4 * (corner // 2) + 4, 4 * (corner % 2) :][:, :4] += 1
    return TensorDataset(x, y)


def network():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 4)
    )


def main():
    dist.init_process_group(backend="gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(network())
    loss_of = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    train_set, test_set = images(256, seed=1), images(128, seed=2)
    sampler = DistributedSampler(train_set, num_replicas=world_size, rank=rank)
    loader = DataLoader(train_set, batch_size=BATCH, sampler=sampler)

    begin = time.perf_counter()
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = loss_of(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"[{os.getpid()}] epoch {epoch}: loss {loss.item():.4f}")

    if rank == 0:
        with torch.no_grad():
            x, y = test_set.tensors
            accuracy = (model.module(x).argmax(1) == y).float().mean().item()
        print(f"accuracy {accuracy:.3f} after {time.perf_counter() - begin:.1f} s")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # torch DDP holds the group as long as there is a model
