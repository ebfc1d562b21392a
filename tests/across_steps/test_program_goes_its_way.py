"""Programs that do more than these schedules are told of: ranks that take other ways through the
model, and the optimizer inside, which the program has had before."""

import copy

import pytest
import torch
from torch import nn

import dpcore
from tests.across_steps.test_page import in_ranks

SCHEDULES = ("bucketed", "priority", "dear", "zero1", "zero2")
IN_PARTS = SCHEDULES[-2:]


def optimizers(model, schedule, make):
    """The optimizer that steps, and the one inside it."""
    inner = make(model.parameters())
    return inner if schedule == "bucketed" else dpcore.DistributedOptimizer(inner, model), inner


def values(model):
    if model.schedule != "bucketed":
        model.flush()
    return [p.detach().clone() for p in model.module.parameters()]


def assert_like_bucketed(train):
    """``train(comm, schedule)`` returns parameters."""
    wanted, *others = (dpcore.spawn(train, 2, schedule, mode="threads") for schedule in SCHEDULES)
    for found in (wanted, *others):
        for of_rank in found:
            assert all(map(torch.equal, of_rank, wanted[0]))


# ---- ranks that go another way ---------------------------------------------------------------


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.begin, self.a, self.b, self.end = (nn.Linear(*n) for n in (
            (8, 64), (64, 64), (64, 64), (64, 4)
        ))  # fmt: skip

    def forward(self, x, way):
        x = self.begin(x)
        for name in way:
            x = getattr(self, name)(x)
        return self.end(x)


@pytest.mark.parametrize("ways", [("ab", "ba"), ("a", "b")], ids=["another order", "a branch"])
def test_the_first_forwards_of_ranks_may_differ(ways):
    start = Branches()

    def train(comm, schedule):
        model = dpcore.DataParallel(
            copy.deepcopy(start), comm=comm, schedule=schedule, bucket_cap_mb=0.001,
            deterministic=True, find_unused_parameters=len(ways[0]) == 1,
        )  # fmt: skip
        stepping, _ = optimizers(model, schedule, lambda p: torch.optim.SGD(p, lr=0.1))
        for step in range(3):
            stepping.zero_grad()
            x = torch.ones(2, 8) * (comm.rank + 1)
            model(x, ways[(comm.rank + step) % 2]).square().mean().backward()
            stepping.step()
        return values(model)

    assert_like_bucketed(train)


# ---- the optimizer inside --------------------------------------------------------------------


START = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


class Training:
    def __init__(self, comm, schedule):
        self.model = dpcore.DataParallel(
            copy.deepcopy(START), comm=comm, schedule=schedule, deterministic=True
        )
        self.stepping, self.inner = optimizers(
            self.model, schedule, lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False)
        )
        self.rank = comm.rank

    def step(self, number):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * number + self.rank))
        self.stepping.zero_grad()
        self.model(x).square().mean().backward()
        self.stepping.step()

    def whole_state(self):
        of = self.stepping
        state = of.state_dict() if of is self.inner else of.full_state_dict()
        return copy.deepcopy(state)


def test_a_program_may_load_by_the_optimizer_that_it_made_first():
    def train(comm, schedule):
        training = Training(comm, schedule)
        for number in range(3):
            training.step(number)
        state = training.whole_state()
        training.step(3)
        training.inner.load_state_dict(state)
        scheduler = torch.optim.lr_scheduler.LambdaLR(training.stepping, lambda _: 0.01)
        for number in range(4, 6):  # with the moments of the state, and the new learning rate
            training.step(number)
            scheduler.step()
        return values(training.model)

    assert_like_bucketed(train)


@pytest.mark.parametrize("schedule", IN_PARTS)
def test_an_optimizer_whose_state_is_in_pieces_says_so(schedule):
    def body(comm):
        training = Training(comm, schedule)
        training.inner.state_dict()  # it has none yet
        training.step(0)
        training.step(1)
        with pytest.raises(dpcore.Unsupported, match=r"its part of the state only\. Save full_st"):
            training.inner.state_dict()
        training.model.refresh()
        training.stepping = None
        with pytest.raises(dpcore.Unsupported, match="this AdamW was inside a DistributedOptimi"):
            training.stepping = dpcore.DistributedOptimizer(training.inner, training.model)
            training.step(2)
            training.step(3)

    in_ranks(body)


# ---- memory ----------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", IN_PARTS)
def test_parameters_in_one_memory_are_refused(schedule):
    def body(comm):
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        net[1].weight = nn.Parameter(net[0].weight.data)
        model = dpcore.DataParallel(net, comm=comm, schedule=schedule)
        with pytest.raises(dpcore.Unsupported, match=r"0\.weight and 1\.weight share their memory"):
            dpcore.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)

    in_ranks(body)
