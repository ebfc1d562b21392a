"""LocalSGD and DiLoCo in one process: a list of models, and loops over their parameters.

Written from the papers' formulas, one parameter at a time, without flat tensors or communication.
"""

import torch
from torch import nn

from tests.data_parallel.models import Small, batch

STEPS = 8


def loss_of(model, rank, world, step):
    dtype = next(model.parameters()).dtype
    x, y = (tensor.chunk(world)[rank].to(dtype) for tensor in batch(step))
    return nn.functional.mse_loss(model(x), y)


def inner_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def inner_adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def outer_sgd(parameters):
    return torch.optim.SGD(parameters, lr=1.0)


def outer_nesterov(parameters):
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def train(block, model, optimizer, comm, steps=range(STEPS)):
    """What every rank runs, with ``block`` a LocalSGD or DiLoCo."""
    with block:
        for step in steps:
            optimizer.zero_grad()
            loss_of(model, comm.rank, comm.world_size, step).backward()
            optimizer.step()


class Twin:
    """``fragments``: lists of names. Each is sent after the steps of its entry in ``due``."""

    def __init__(self, world, inner, outer, fragments, due, delay=0, alpha=0.0):
        self.models = [Small() for _ in range(world)]
        self.optimizers = [inner(model.parameters()) for model in self.models]
        self.outer = Small()  # the outer parameters
        self.outer_optimizer = outer(self.outer.parameters())
        self.fragments, self.due, self.delay, self.alpha = fragments, due, delay, alpha

    def run(self, steps):
        for step in range(steps):
            for rank, (model, optimizer) in enumerate(
                zip(self.models, self.optimizers, strict=True)
            ):
                optimizer.zero_grad()
                loss_of(model, rank, len(self.models), step).backward()
                optimizer.step()
            done = step + 1
            for fragment, after in zip(self.fragments, self.due, strict=True):
                if done in after:
                    self.send(fragment)
                if done - self.delay in after:
                    self.land(fragment)
        return self.models

    @torch.no_grad()
    def send(self, fragment):
        self.outer_optimizer.zero_grad()
        for name in fragment:
            outer = self.outer.get_parameter(name)
            ways = [outer - model.get_parameter(name) for model in self.models]
            outer.grad = torch.stack(ways).mean(0)

    @torch.no_grad()
    def land(self, fragment):
        self.outer_optimizer.step()
        kept = self.alpha if self.delay else 0.0
        for name in fragment:
            outer = self.outer.get_parameter(name)
            for model in self.models:
                own = model.get_parameter(name)
                own.copy_(kept * own + (1 - kept) * outer)


def distance(model, other):
    """The largest difference of a parameter, of the largest parameter."""
    largest = max(p.abs().max().item() for p in other.parameters())
    return max(
        (mine - theirs).abs().max().item() / largest
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True)
    )


def names_of(model):
    return [name for name, p in model.named_parameters() if p.requires_grad]
