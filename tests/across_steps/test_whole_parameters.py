"""Optimizers that look at whole parameters: under `priority` and `dear` they train as one process
with all samples does, and bit for bit as with `bucketed`; the schedules that cut parameters refuse
them."""

import copy
import sys
from itertools import pairwise

import pytest
import torch
from torch import nn

import dpcore
from tests.across_steps.models import INPUTS, OUTPUTS, Chain, made
from tests.across_steps.sides import CAP_MB
from tests.course.conftest import COURSE
from tests.data_parallel.models import batch, part

sys.path.insert(0, str(COURSE))
from optimizers import Lamb, Lars, NovoGrad


class Matrices(nn.Module):
    """torch's Muon takes nothing else."""

    def __init__(self):
        super().__init__()
        sizes = (INPUTS, 19, 23, 17, OUTPUTS)
        self.layers = nn.ModuleList(nn.Linear(i, o, bias=False) for i, o in pairwise(sizes))

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return self.layers[-1](x)


MAKE = {
    "Muon": (Matrices, lambda p: torch.optim.Muon(p, lr=0.02, weight_decay=0.1)),
    "Adafactor": (Chain, lambda p: torch.optim.Adafactor(p, lr=0.02, weight_decay=0.1)),
    "Lars": (Chain, lambda p: Lars(p, lr=0.5, weight_decay=0.1, eta=0.02)),
    "Lamb": (Chain, lambda p: Lamb(p, lr=0.02, weight_decay=0.1)),
    "NovoGrad": (Chain, lambda p: NovoGrad(p, lr=0.02, weight_decay=0.1)),
}


def trained(model, optimizer, mine=lambda tensor: tensor):
    rates = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    for step in range(4):
        x, y = map(mine, batch(step))
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        rates.step()
    return [p.detach().clone() for p in model.parameters()]


def on_ranks(name, schedule):
    def body(comm):
        kind, make = MAKE[name]
        model = dpcore.DataParallel(
            made(kind), comm=comm, schedule=schedule, bucket_cap_mb=CAP_MB, deterministic=True
        )
        optimizer = make(model.parameters())
        if schedule != "bucketed":
            optimizer = dpcore.DistributedOptimizer(optimizer, model)
        return trained(model, optimizer, lambda tensor: part(tensor, comm))

    return body


@pytest.mark.parametrize("schedule", ["priority", "dear"])
@pytest.mark.parametrize("name", MAKE)
def test_it_trains_as_one_process_does(name, schedule):
    kind, make = MAKE[name]
    module = made(kind)
    alone = trained(module, make(module.parameters()))
    for world in (2, 3):
        plain = dpcore.spawn(on_ranks(name, "bucketed"), world, mode="threads", timeout=20)
        for rank in dpcore.spawn(on_ranks(name, schedule), world, mode="threads", timeout=20):
            for mine, bucketed, wanted in zip(rank, plain[0], alone, strict=True):
                assert torch.equal(mine, bucketed)
                torch.testing.assert_close(mine, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("schedule", ["zero1", "zero2"])
@pytest.mark.parametrize("name", MAKE)
def test_schedules_that_cut_parameters_refuse_it(name, schedule):
    def body(comm):
        with pytest.raises(dpcore.Unsupported, match=f"{schedule}.*{name} needs them whole"):
            on_ranks(name, schedule)(comm)

    dpcore.spawn(body, 1, mode="threads")


class Factored(torch.optim.Optimizer):
    """Keeps a number per row, as transformers' Adafactor does."""

    per_parameter = True

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                squares = p.grad.square().mean(-1)
                rows = self.state[p].setdefault("rows", torch.zeros_like(squares))
                rows.lerp_(squares, 0.5)
                p -= group["lr"] * p.grad / (rows.sqrt().unsqueeze(-1) + 1e-6)


@pytest.mark.parametrize("schedule", ["priority", "dear"])
def test_a_state_of_another_shape_goes_on(schedule):
    def body(comm):
        def made_again():
            model = dpcore.DataParallel(made(Matrices), comm=comm, schedule=schedule)
            return model, dpcore.DistributedOptimizer(Factored(model.parameters()), model)

        model, optimizer = made_again()
        trained(model, optimizer)
        again, other = made_again()
        again.load_state_dict(model.state_dict())
        other.load_state_dict(copy.deepcopy(optimizer.full_state_dict()))
        for mine, its in zip(trained(model, optimizer), trained(again, other), strict=True):
            assert torch.equal(mine, its)

    dpcore.spawn(body, 2, mode="threads", timeout=20)
