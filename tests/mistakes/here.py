"""What a program of the museum gets: its rank, data, and the wrapper that it is judged with.

A program is a generator that yields after each of its steps, so that whoever runs it knows in which
step something was said. It is written once, as a script for DDP, and runs over torch and dpcore.
"""

import torch
import torch.distributed as dist
from torch import nn

import dpcore

STEPS = 10
LONG = 30  # longer than programs take to average parameters themselves
ACROSS_STEPS = ("priority", "dear", "zero1", "zero2")


class Net(nn.Module):
    """features.weight, features.bias, head.weight, head.bias."""

    def __init__(self, *, buffers=False, dropout=0.0, seed=1):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.features = nn.Linear(4, 8)
            self.norm = nn.BatchNorm1d(8) if buffers else nn.Identity()
            self.drop = nn.Dropout(dropout)
            self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.drop(torch.tanh(self.norm(self.features(x)))))

    def penalty(self):
        return self.head.weight.square().sum()


def loss_of(model, batch):
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


def update(model, optimizer, batch):
    """One step as it should be."""
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()
    return loss.item()


class Here:
    """One rank, over torch DDP or over dpcore."""

    def __init__(self, rank, world, *, is_torch=False, schedule=None, group=None, mistakes="warn"):
        self.rank, self.world = rank, world
        self.is_torch, self.schedule, self.group = is_torch, schedule, group
        self.mistakes = mistakes
        self.steps = range(STEPS)
        self.models = []

    def wrap(self, module, **options):
        if self.is_torch:
            model = nn.parallel.DistributedDataParallel(module, **options)
        else:
            if self.schedule is not None:
                options["schedule"] = self.schedule
            if self.group is not None:
                options["process_group"] = self.group
            model = dpcore.DataParallel(module, mistakes=self.mistakes, **options)
        self.models.append(model)
        return model

    def optimizer(self, model, kind=torch.optim.SGD, **settings):
        """Of all parameters. The schedules that go across steps need one line more."""
        settings.setdefault("lr", 0.05)
        return self.trained(kind(model.parameters(), **settings), model)

    def trained(self, optimizer, model):
        if not self.is_torch and self.schedule in ACROSS_STEPS:
            return dpcore.DistributedOptimizer(optimizer, model)
        return optimizer

    def batch(self, step, rows=4, of=None):
        """Other rows on each rank."""
        generator = torch.Generator().manual_seed(1000 * step + (self.rank if of is None else of))
        x = torch.randn(rows, 4, generator=generator)
        return x, x.sum(1, keepdim=True).tanh()

    def own_randomness(self, seed=0):
        """A generator with a seed of this rank."""
        return torch.Generator().manual_seed(100 * seed + self.rank)

    def all_reduce(self, tensor):
        """The sum over ranks, in place."""
        if dist.is_initialized():
            dist.all_reduce(tensor)
        else:
            dpcore.current().all_reduce(tensor)
        return tensor

    def broadcast(self, tensor, root=0):
        if dist.is_initialized():
            dist.broadcast(tensor, root)
        else:
            dpcore.current().broadcast(tensor, root)
        return tensor
