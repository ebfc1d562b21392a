"""DPCORE_CHECK_EVERY: the check of ``dpcore.check``, without a line in the program."""

import os

import pytest
import torch
from torch import nn

import dpcore
from dpcore.ddp import check as checking
from tests.data_parallel.models import seeded


@pytest.fixture
def every_second(monkeypatch):
    monkeypatch.setenv("DPCORE_CHECK_EVERY", "2")


@pytest.fixture
def checked(monkeypatch):
    """The arguments of each check, by rank."""
    calls = {}
    plain = checking.check

    def noted(model, *more, **options):
        calls.setdefault(model.group.rank, []).append((model._reducer.completed, more))
        return plain(model, *more, **options)

    monkeypatch.setattr(checking, "check", noted)
    return calls


def net():
    return seeded(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)))


def step(model, *optimizers):
    for optimizer in optimizers:
        optimizer.zero_grad()
    model(torch.ones(2, 3) + model.group.rank).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()


def test_it_names_the_first_difference_and_since_when(every_second):
    def body(comm):
        model = dpcore.DataParallel(net(), comm=comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            step(model, optimizer)
        if comm.rank == 2:
            with torch.no_grad():
                model.module[1].weight[0, 1] += 2**-20
        with pytest.raises(dpcore.Mismatch) as mismatch:
            for _ in range(3):
                step(model, optimizer)
        assert model._reducer.completed == 4
        return str(mismatch.value)

    for rank, text in enumerate(dpcore.spawn(body, 3, mode="threads")):
        assert text.startswith(f"rank {rank}, after step 4: parameter ")
        assert "weight differs on rank 2 from ranks 0, 1 in " in text
        assert "; equal after step 2 (" in text or "; equal after step 2. " in text


def test_optimizers_that_step_the_model_are_compared(every_second, checked):
    def body(comm):
        model = dpcore.DataParallel(net(), comm=comm)
        early = torch.optim.SGD(model.module[0].parameters(), lr=0.1)
        late = torch.optim.Adam(model.module[1].parameters())
        other = dpcore.DataParallel(net(), comm=comm)
        for number in range(7):
            step(model, *([early, late] if number < 3 else [late]))
        step(other)  # its first step: nothing to compare yet
        late.param_groups[0]["lr"] = 1 + comm.rank
        with pytest.raises(dpcore.Mismatch, match=r"lr differs between .*: 1 and 2; equal aft"):
            for _ in range(2):
                step(model, late)
        return early, late

    for rank, (early, late) in enumerate(dpcore.spawn(body, 2, mode="threads")):
        assert checked[rank] == [(2, (early, late)), (4, (early, late)), (6, (late,)), (8, (late,))]


@pytest.mark.parametrize("schedule", ["priority", "dear", "zero1"])
def test_across_steps(every_second, checked, schedule):
    def body(comm):
        model = dpcore.DataParallel(net(), comm=comm, schedule=schedule)
        optimizer = torch.optim.Adam(model.parameters())
        optimizer = dpcore.DistributedOptimizer(optimizer, model)
        for _ in range(6):  # a step is complete within the next forward
            step(model, optimizer)
        return optimizer

    optimizers = dpcore.spawn(body, 2, mode="threads")
    for rank, optimizer in enumerate(optimizers):
        assert checked[rank] == [(2, (optimizer,)), (4, (optimizer,))]


def test_only_synchronised_forwards_count(every_second, checked):
    """Evaluation, accumulation and forwards without a backward change nothing."""

    def body(comm):
        model = dpcore.DataParallel(nn.BatchNorm1d(3), comm=comm)
        for number in range(5):
            if comm.rank == 0:
                with torch.no_grad():
                    model.module(torch.ones(2, 3))
            with model.no_sync():
                step(model)
            model(torch.randn(2, 3))
            step(model)
            assert model._reducer.completed == number + 1

    dpcore.spawn(body, 2, mode="threads")
    assert checked == {rank: [(2, ()), (4, ())] for rank in range(2)}


def test_ranks_may_evaluate_different_numbers_of_batches(every_second):
    """The first forward after a step sends buffers, in training on one rank and not on another."""

    def body(comm):
        model = dpcore.DataParallel(nn.BatchNorm1d(3), comm=comm)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(5):
            step(model, optimizer)
            with torch.no_grad():
                for _ in range((number + comm.rank) % 3):
                    model(torch.randn(2, 3))

    dpcore.spawn(body, 2, mode="threads")


def test_ranks_that_want_different_checks_are_told():
    def body(comm):
        os.environ["DPCORE_CHECK_EVERY"] = ["", "100"][comm.rank]
        with pytest.raises(dpcore.Mismatch, match="DPCORE_CHECK_EVERY=0' where rank 1 has 'DPCORE"):
            dpcore.DataParallel(net(), comm=comm)

    dpcore.spawn(body, 2)


def test_a_value_that_means_nothing_names_the_variable(monkeypatch):
    monkeypatch.setenv("DPCORE_CHECK_EVERY", "often")
    with pytest.raises(dpcore.Unsupported, match=r"^DPCORE_CHECK_EVERY=often: it must be a number"):
        dpcore.spawn(lambda comm: dpcore.DataParallel(net(), comm=comm), 1, mode="threads")
