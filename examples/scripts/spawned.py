"""Trains on processes that the script starts by itself, and reports throughput and accuracy.

python examples/scripts/spawned.py --gpus 2 --batch-size 16 --epochs 4 --target-accuracy 0.9
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser(description="a residual network on several ranks")
parser.add_argument("--nodes", type=int, default=1)
parser.add_argument("--node-id", type=int, default=0)
parser.add_argument("--gpus", type=int, default=2, help="ranks on this node")
parser.add_argument("--batch-size", type=int, default=16, help="of a rank")
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--base-lr", type=float, default=0.02)
parser.add_argument("--target-accuracy", type=float, default=0.9)
parser.add_argument("--patience", type=int, default=2)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, x):
        return torch.relu(x + self.inner(x))


def garments(count, seed):
    """Vectors of ten kinds, each around a pattern of its own."""
    patterns = torch.randn(10, 64, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 10, (count,), generator=generator)
    return TensorDataset(patterns[y] + torch.randn(count, 64, generator=generator), y)


def average(value):
    """The mean over all ranks."""
    total = torch.tensor(float(value))
    dist.all_reduce(total, op=dist.ReduceOp.SUM)
    return (total / dist.get_world_size()).item()


def worker(local_rank, args):
    rank, world_size = args.node_id * args.gpus + local_rank, args.nodes * args.gpus
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 32), Block(32), Block(32), nn.Linear(32, 10))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=args.base_lr * world_size, momentum=0.9)
    data, held_out = garments(640, 1), garments(160, 2)
    sampler = DistributedSampler(data, num_replicas=world_size, rank=rank)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler, drop_last=True)
    mine = Subset(held_out, range(rank, len(held_out), world_size))  # each sample once
    test_loader = DataLoader(mine, batch_size=args.batch_size)

    good = 0
    for epoch in range(args.epochs):
        begin = time.time()
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
        throughput = average(len(loader) * args.batch_size / (time.time() - begin)) * world_size
        with torch.no_grad():
            right = sum((model.module(x).argmax(1) == y).sum().item() for x, y in test_loader)
        accuracy = average(right) * world_size / len(held_out)
        if rank == 0:
            print(f"epoch {epoch}: {throughput:.0f} images/s, validation accuracy {accuracy:.3f}")
        good = good + 1 if accuracy >= args.target_accuracy else 0
        if good == args.patience:
            break
    del model  # torch DDP holds the group
    dist.destroy_process_group()


if __name__ == "__main__":
    arguments = parser.parse_args()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29512")
    mp.spawn(worker, nprocs=arguments.gpus, args=(arguments,))
