"""What LocalSGD and DiLoCo train: the twin's parameters, on every rank, in every kind of group."""

import pytest
import torch
from torch import nn

import dpcore as dp
from tests.data_parallel.models import OPTIMIZERS, Small, seeded, train_alone
from tests.local_updates.twin import (
    STEPS,
    Twin,
    distance,
    inner_adamw,
    inner_sgd,
    loss_of,
    names_of,
    outer_nesterov,
    outer_sgd,
    train,
)
from tests.ranks.groups import in_group

WORLDS = (1, 2, 3, 4)
NEAR = 1e-6  # of the largest parameter
FAR = 1e-3  # what a mistake makes of it at least


def local_sgd(comm, sync_every, inner=inner_sgd, dtype=torch.float64, **options):
    model = Small(seed=7 + comm.rank).to(dtype)  # ranks begin with different values
    optimizer = inner(model.parameters())
    train(dp.LocalSGD(model, optimizer, sync_every, comm=comm, **options), model, optimizer, comm)
    return model


def diloco(
    comm, outer, sync_every, inner=inner_sgd, kind=dp.DiLoCo, dtype=torch.float64, **options
):
    model = Small(seed=7 + comm.rank).to(dtype)
    optimizer = inner(model.parameters())
    block = kind(model, optimizer, outer(model.parameters()), sync_every, comm=comm, **options)
    train(block, model, optimizer, comm)
    return model


def of_all_ranks(body, world, **how):
    models = dp.spawn(body, world, **(how or {"mode": "threads"}))
    for model in models[1:]:
        assert distance(model, models[0]) == 0  # the same bits
    return models[0]


def whole_twin(world, sync_every, inner, outer):
    every = set(range(sync_every, STEPS + 1, sync_every)) | {STEPS}
    return Twin(world, inner, outer, [names_of(Small())], [every]).run(STEPS)[0]


@pytest.mark.parametrize("world", WORLDS)
def test_sync_every_step_with_sgd_is_data_parallel(world):
    """The mean of steps against gradients is a step against their mean."""
    model = of_all_ranks(lambda comm: local_sgd(comm, 1), world)
    assert distance(model, train_alone(OPTIMIZERS["sgd"], STEPS)) < NEAR


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("inner", (inner_sgd, inner_adamw))
def test_local_sgd_is_its_twin(world, inner):
    model = of_all_ranks(lambda comm: local_sgd(comm, 3, inner), world)
    assert distance(model, whole_twin(world, 3, inner, outer_sgd)) < NEAR
    if world > 1:  # the steps between were each rank's own
        assert distance(model, whole_twin(world, 1, inner, outer_sgd)) > FAR


@pytest.mark.parametrize("world", WORLDS)
def test_an_outer_step_of_one_is_local_sgd(world):
    model = of_all_ranks(lambda comm: diloco(comm, outer_sgd, 4), world)
    assert distance(model, of_all_ranks(lambda comm: local_sgd(comm, 4), world)) < NEAR


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("inner", (inner_sgd, inner_adamw))
def test_diloco_is_its_twin(world, inner):
    model = of_all_ranks(lambda comm: diloco(comm, outer_nesterov, 4, inner), world)
    assert distance(model, whole_twin(world, 4, inner, outer_nesterov)) < NEAR


@pytest.mark.parametrize("world", WORLDS)
def test_in_float32(world):
    """Both of the equalities above, beside DataParallel itself."""

    def data_parallel(comm):
        model = dp.DataParallel(Small().float(), comm=comm)
        optimizer = inner_sgd(model.parameters())
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, comm.rank, world, step).backward()
            optimizer.step()
        return model.module

    every = of_all_ranks(lambda comm: local_sgd(comm, 1, dtype=torch.float32), world)
    assert distance(every, of_all_ranks(data_parallel, world)) < NEAR
    local = of_all_ranks(lambda comm: local_sgd(comm, 4, dtype=torch.float32), world)
    outer = of_all_ranks(lambda comm: diloco(comm, outer_sgd, 4, dtype=torch.float32), world)
    assert 0 < distance(outer, local) < NEAR  # other roundings


class Reversed(dp.DiLoCo):
    """A mistake that trains all the same: the outer gradient points where the ranks went."""

    def _outer_gradient(self, fragment, outer, out):
        super()._outer_gradient(fragment, outer, out)
        out.neg_()


class SumsUp(dp.DiLoCo):
    """A sum where a mean belongs."""

    def _outer_gradient(self, fragment, outer, out):
        super()._outer_gradient(fragment, outer, out)
        out.mul_(self._model_group.world_size)


class ForgetsTheOuterParameters(dp.DiLoCo):
    """The outer optimizer goes on from where rank 0 happens to be."""

    def _take(self, number, is_late):
        self._take_parameters()
        return super()._take(number, is_late)


@pytest.mark.parametrize("mutant", (Reversed, SumsUp, ForgetsTheOuterParameters))
def test_mistakes_are_seen(mutant):
    """By the comparisons above, far beyond their bound."""
    models = dp.spawn(lambda comm: diloco(comm, outer_sgd, 4, kind=mutant), 2, mode="threads")
    right = of_all_ranks(lambda comm: local_sgd(comm, 4), 2)
    assert distance(models[0], right) > FAR
    models = dp.spawn(lambda comm: diloco(comm, outer_nesterov, 4, kind=mutant), 2, mode="threads")
    assert distance(models[0], whole_twin(2, 4, inner_sgd, outer_nesterov)) > FAR


@pytest.mark.parametrize("how", ({}, {"transport": "tcp"}), ids=("shm", "tcp"))
def test_processes_train_the_same(how):
    options = {"fragments": 2, "fragment_sync_delay": 1, "bits": 8}

    def body(comm):
        assert comm.transport == how.get("transport", "shm")
        whole, eight = local_sgd(comm, 4), diloco(comm, outer_nesterov, 4, **options)
        return nn.ModuleList([whole, eight])

    threads = of_all_ranks(body_of_threads(options), 2)
    processes = of_all_ranks(body, 2, mode="processes", **how)
    assert distance(processes, threads) < NEAR


def body_of_threads(options):
    return lambda comm: nn.ModuleList(
        [local_sgd(comm, 4), diloco(comm, outer_nesterov, 4, **options)]
    )


class Everybody:
    """A rank's place in torch's default group."""

    def __init__(self):
        self.rank, self.world_size = (
            torch.distributed.get_rank(),
            torch.distributed.get_world_size(),
        )


@pytest.mark.parametrize("backend", ("gloo", "dpcore"))
@pytest.mark.parametrize("literally", (False, True))
def test_groups_of_torch_train_the_same(backend, literally):
    """``literally``: over the group itself, with nothing of ours in its place."""
    options = {"fragments": 2, "fragment_sync_delay": 1, "bits": 8}

    def body():
        place = Everybody()
        group = {"comm": torch.distributed.group.WORLD} if literally else {}
        return nn.ModuleList([in_a_group(place, group, {}), in_a_group(place, group, options)])

    models = in_group(body, 2, backend=backend)
    assert distance(models[0], models[1]) == 0
    assert distance(models[0], of_all_ranks(body_of_threads(options), 2)) < NEAR


def in_a_group(place, group, options):
    model = Small(seed=7 + place.rank)
    optimizer = inner_sgd(model.parameters())
    if options:
        outer = outer_nesterov(model.parameters())
        block = dp.DiLoCo(model, optimizer, outer, 4, **options, **group)
    else:
        block = dp.LocalSGD(model, optimizer, 4, **group)
    train(block, model, optimizer, place)
    return model


def test_parameters_of_several_types_and_layouts():
    """The outer parameters are float32 where the module's are less; nothing is lost between."""

    class Mixed(nn.Module):
        def __init__(self, rank):
            super().__init__()
            self.coarse = nn.Parameter(torch.full((3, 5), 1.0 + rank, dtype=torch.bfloat16))
            self.turned = nn.Parameter(torch.randn(4, 6).t())

        def forward(self):
            return self.coarse.float().square().sum() + self.turned.square().sum()

    def body(comm):
        model = seeded(lambda: Mixed(comm.rank), 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * (comm.rank + 1))
        outer = torch.optim.SGD(model.parameters(), lr=0.01)  # less than bfloat16 can show
        with dp.DiLoCo(model, optimizer, outer, 1, comm=comm):
            for _ in range(60):
                optimizer.zero_grad()
                model().backward()
                optimizer.step()
        return model.coarse.detach().float(), model.turned.detach()

    (coarse, turned), (other_coarse, other_turned) = dp.spawn(body, 2, mode="threads")
    assert torch.equal(coarse, other_coarse) and torch.equal(turned, other_turned)
    expected = (1 - 0.01 * 2 * 0.015) ** 60  # a step of the mean is 1.5% of twice the value
    assert coarse.flatten().tolist() == pytest.approx([expected] * 15, rel=0.005)


def test_buffers_are_those_of_rank_0():
    def body(comm):
        model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), comm.rank)
        model[1].running_mean.fill_(comm.rank)
        optimizer = inner_sgd(model.parameters())
        seen = []
        with dp.LocalSGD(model, optimizer, 2, comm=comm):
            seen.append(model[1].running_mean.clone())
            for _ in range(3):
                optimizer.zero_grad()
                x = torch.arange(24.0).reshape(6, 4).sin() + comm.rank
                model(x).square().sum().backward()
                optimizer.step()
                seen.append(model[1].running_mean.clone())
        seen.append(model[1].running_mean.clone())
        return torch.stack(seen)

    first, second = dp.spawn(body, 2, mode="threads")
    equal = (first == second).all(dim=1).tolist()
    assert equal == [True, False, True, False, True]  # at the start, after step 2 and at the end
    assert first[0].tolist() == [0.0] * 4


def test_a_buffer_that_is_registered_within_the_block():
    def body(comm):
        model = nn.Linear(4, 4)
        optimizer = inner_sgd(model.parameters())
        with dp.LocalSGD(model, optimizer, 2, comm=comm):
            model.register_buffer("late", torch.full((3,), 1.0 + comm.rank))
            optimizer.step()
            assert model.late.tolist() == [1.0 + comm.rank] * 3
            optimizer.step()
            assert model.late.tolist() == [1.0] * 3

    dp.spawn(body, 2, mode="threads")


def test_several_optimizers_and_frozen_parameters():
    """All that is trained is averaged, whoever trains it, after the step of the one given."""

    def body(comm):
        model = Small(seed=7 + comm.rank)
        first = torch.optim.SGD(model.first.parameters(), lr=0.1)
        rest = torch.optim.AdamW([*model.shared.parameters(), *model.last.parameters()], lr=0.01)
        with dp.LocalSGD(model, rest, 2, comm=comm):
            for step in range(4):
                model.zero_grad()
                model(torch.full((2, 6), comm.rank + step + 1.0).double()).square().sum().backward()
                first.step()
                rest.step()
                if step % 2 == 0:
                    middle = model.first.weight.detach().clone()
        return model, middle

    (model, middle), (other, other_middle) = dp.spawn(body, 2, mode="threads")
    assert distance(model, other) == 0
    assert not torch.equal(middle, other_middle)
    assert torch.equal(model.frozen.weight, Small(seed=7).frozen.weight)


def test_gradients_within_groups_and_parameters_between_them():
    """Two hosts, say: DataParallel on each, and LocalSGD across: two ranks with twice the rows."""

    def body(comm):
        host = comm.split(comm.rank // 2)
        between = comm.split(comm.rank % 2)
        model = dp.DataParallel(Small(seed=7 + comm.rank), comm=host)
        optimizer = inner_sgd(model.parameters())
        with dp.LocalSGD(model.module, optimizer, 4, comm=between):
            for step in range(STEPS):
                optimizer.zero_grad()
                loss_of(model, comm.rank, 4, step).backward()
                optimizer.step()
        return model.module

    model = of_all_ranks(body, 4)
    assert distance(model, of_all_ranks(lambda comm: local_sgd(comm, 4), 2)) < NEAR


def test_an_optimizer_that_a_framework_has_wrapped():
    """As accelerate does: a torch.optim.Optimizer that passes all on, and has no hooks."""

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, optimizer):
            self.optimizer = optimizer

        param_groups = property(lambda self: self.optimizer.param_groups)

        def zero_grad(self, set_to_none=True):
            self.optimizer.zero_grad(set_to_none)

        def step(self, closure=None):
            return self.optimizer.step(closure)

    wrapped = of_all_ranks(
        lambda comm: local_sgd(comm, 3, lambda parameters: Wrapper(inner_sgd(parameters))), 2
    )
    assert distance(wrapped, of_all_ranks(lambda comm: local_sgd(comm, 3), 2)) == 0
