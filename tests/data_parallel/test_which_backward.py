"""Which backward is averaged: one that goes through what a synchronised forward returned."""

import time

import pytest
import torch
from torch import nn

import dpcore
from tests.data_parallel.test_features import Branches


def wrapped(comm, **options):
    torch.manual_seed(0)
    model = dpcore.DataParallel(nn.Linear(2, 1, bias=False), comm=comm, **options)
    mine = torch.full((1, 2), comm.rank + 1.0)
    for _ in range(3):  # later steps are not as the first
        model.zero_grad()
        model(mine).sum().backward()
    model.zero_grad()
    return model, mine


def gradient(model):
    return model.module.weight.grad.flatten()[0].item()


@pytest.mark.parametrize("as_view", [True, False])
def test_the_module_by_itself_is_not_averaged(as_view):
    def body(comm):
        model, mine = wrapped(comm, gradient_as_bucket_view=as_view)
        model.module(mine).sum().backward()
        assert gradient(model) == comm.rank + 1
        with model.no_sync():
            model.module(mine).sum().backward()
        assert gradient(model) == 2 * (comm.rank + 1)
        model(mine).sum().backward()  # takes along what was added up
        assert gradient(model) == 3 * 1.5

    dpcore.spawn(body, 2, mode="threads")


def test_one_rank_may_use_its_module_alone():
    def body(comm):
        model, mine = wrapped(comm)
        if comm.rank == 0:
            model.module(100 * mine).sum().backward()
            model.zero_grad()
        model(mine).sum().backward()
        assert gradient(model) == 1.5

    dpcore.spawn(body, 2, mode="threads")


def test_a_forward_without_synchronisation_takes_no_average_away():
    def body(comm):
        model, mine = wrapped(comm)
        synchronised = model(mine).sum()
        with model.no_sync():
            other = model(10 * mine).sum()
        (synchronised + other).backward()
        assert gradient(model) == 11 * 1.5
        model.zero_grad()
        synchronised = model(mine).sum()
        with model.no_sync():
            model(10 * mine)
        synchronised.backward()
        assert gradient(model) == 1.5

    dpcore.spawn(body, 2, mode="threads")


class Result:
    """No tensor is found in it."""

    def __init__(self, output):
        self.output = output


class Heads(nn.Module):
    def __init__(self, count, maker):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(2, 1, bias=False) for _ in range(count))
        self.maker = maker

    def forward(self, x, which):
        output = self.heads[which](x)
        return self.maker(output) if self.maker else output


@pytest.mark.parametrize("maker", [None, Result])
@pytest.mark.parametrize("other", [0, 1])
def test_one_backward_of_two_forwards_of_which_one_is_not_synchronised(maker, other):
    """With another head, gradients come before the run has been through the output that counts; of
    an object nothing is known, so its backward may be either."""

    def body(comm):
        torch.manual_seed(0)
        model = dpcore.DataParallel(Heads(1 + other, maker), comm=comm)
        mine = torch.full((1, 2), comm.rank + 1.0)
        for _ in range(3):
            model.zero_grad()
            first = model(mine, 0)
            with model.no_sync():
                second = model(10 * mine, other)
            both = [one.output if maker else one for one in (second, first)]
            sum(both).sum().backward()
            found = [head.weight.grad.unique().tolist() for head in model.module.heads]
            assert found == ([[1.5], [15.0]] if other else [[11 * 1.5]])

    dpcore.spawn(body, 2, mode="threads")


def test_a_forward_without_backward_averages_nothing_within_no_sync():
    def body(comm):
        model, mine = wrapped(comm)
        model(mine)
        with model.no_sync():
            model(mine).sum().backward()
        assert gradient(model) == comm.rank + 1
        model(mine).sum().backward()
        assert gradient(model) == 2 * 1.5

    dpcore.spawn(body, 2, mode="threads")


def test_a_second_backward_of_one_forward_is_averaged():
    def body(comm):
        model, mine = wrapped(comm)
        loss = model(mine).sum()
        for _ in range(2):
            model.zero_grad()
            loss.backward(retain_graph=True)
            assert gradient(model) == 1.5

    dpcore.spawn(body, 2, mode="threads")


def test_a_parameter_that_an_earlier_forward_used_is_not_unused():
    def body(comm):
        model = dpcore.DataParallel(Branches(), comm=comm, find_unused_parameters=True)
        x = torch.full((1, 4), comm.rank + 1.0)
        for _ in range(3):
            model.zero_grad()
            earlier = model(x, which=1 if comm.rank == 0 else 0)["out"][0]
            last = model(x, which=0)["out"][0]
            (earlier.sum() + last.sum()).backward()
            assert model.module.branches[1].bias.grad.tolist() == [0.5] * 4  # of rank 0 only

    dpcore.spawn(body, 2, mode="threads")


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.last = nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1)

    def forward(self, index, uses_table):
        return self.last(self.table(index) if uses_table else torch.ones(1, 2)).sum()


@pytest.mark.parametrize("as_view", [True, False])
def test_a_static_graph_without_the_table_on_one_rank(as_view):
    def body(comm):
        torch.manual_seed(0)
        model = dpcore.DataParallel(
            Sparse(), comm=comm, static_graph=True, gradient_as_bucket_view=as_view
        )
        for _ in range(3):
            model.zero_grad()
            model(torch.tensor([1]), uses_table=comm.rank == 0).backward()
            expected = torch.zeros(4, 2)
            expected[1] = model.module.last.weight[0].detach() / 2
            assert torch.equal(model.module.table.weight.grad.to_dense(), expected)

    dpcore.spawn(body, 2)


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.02)
        return gradient


class SlowLinear(nn.Linear):
    def forward(self, x):
        return SlowBackward.apply(super().forward(x))


def test_a_static_graph_notes_when_its_gradients_came():
    """Buckets are measured by it, and in the first backward all are taken at the end."""

    def body(comm):
        layers = nn.Sequential(SlowLinear(4, 4), SlowLinear(4, 4), SlowLinear(4, 4))
        model = dpcore.DataParallel(layers, comm=comm, static_graph=True)
        model(torch.ones(1, 4)).sum().backward()
        came = model._reducer.arrival_ns
        assert came == sorted(came) and came[-1] - came[0] >= 2 * 20_000_000

    dpcore.spawn(body, 2, mode="threads")
