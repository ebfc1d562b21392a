"""Models and training loops that the tests of DataParallel share."""

import threading

import torch
from torch import nn

import dpcore

ROWS = 12  # of the whole batch: divisible by every world from 1 to 4
STEPS = 5

_seeding = threading.Lock()  # ranks may be threads, which share torch's generator


def seeded(make, seed=7):
    """What ``make()`` makes, while no other rank takes from the generator."""
    with _seeding:
        torch.manual_seed(seed)
        return make()


class Small(nn.Module):
    """Layers of different sizes, a frozen one, one used twice, buffers: in float64."""

    def __init__(self, seed=7):
        super().__init__()
        with _seeding:
            torch.manual_seed(seed)
            self.first = nn.Linear(6, 40)
            self.norm = nn.LayerNorm(40)
            self.shared = nn.Linear(40, 40)
            self.frozen = nn.Linear(40, 40)
            self.last = nn.Linear(40, 3)
        self.frozen.requires_grad_(False)
        self.double()

    def forward(self, x):
        x = torch.tanh(self.norm(self.first(x)))
        x = torch.tanh(self.shared(x))
        x = x + self.frozen(x)
        return self.last(torch.tanh(self.shared(x)))


def batch(step, rows=ROWS):
    generator = torch.Generator().manual_seed(1000 + step)
    with torch.device("cpu"):
        x = torch.randn(rows, 6, dtype=torch.float64, generator=generator)
        y = torch.randn(rows, 3, dtype=torch.float64, generator=generator)
    there = torch.get_default_device()
    return x.to(there), y.to(there)


def part(tensor, comm):
    return tensor.chunk(comm.world_size)[comm.rank]


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}


def train_alone(make_optimizer, steps=STEPS, model=None):
    """One process with the whole batch: what every rank must arrive at."""
    model = model or Small()
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return model


def train(comm, make_optimizer, steps=STEPS, wrap=dpcore.DataParallel, model=None, **options):
    """The same with a part of the batch on each rank. Ranks begin with different values."""
    model = wrap(model or Small(seed=7 + comm.rank), comm=comm, **options)
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
    for step in range(steps):
        x, y = (part(tensor, comm) for tensor in batch(step))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return model


def assert_same_values(model, reference):
    for (name, mine), (_, theirs) in zip(
        model.named_parameters(), reference.named_parameters(), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-13, msg=name)
