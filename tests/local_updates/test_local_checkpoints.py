"""A training that is saved and goes on elsewhere is the one that went on here, to the bit."""

import copy
import io

import pytest
import torch
from torch import nn

import dpcore as dp
from tests.data_parallel.models import Small
from tests.local_updates.twin import (
    distance,
    inner_adamw,
    loss_of,
    outer_nesterov,
)

OPTIONS = [
    {},
    {"fragments": 2},
    {"fragments": 2, "fragment_sync_delay": 1, "fragment_update_alpha": 0.5},
    {"fragments": 1, "fragment_sync_delay": 3, "bits": 8},
]


def made(comm, options, model=None):
    model = model or Small(seed=7 + comm.rank)
    optimizer = inner_adamw(model.parameters())
    if options is None:
        return model, optimizer, dp.LocalSGD(model, optimizer, 4)
    outer = outer_nesterov(model.parameters())
    return model, optimizer, dp.DiLoCo(model, optimizer, outer, 4, **options)


def run(model, optimizer, comm, steps):
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, comm.rank, comm.world_size, step).backward()
        optimizer.step()


def stored(thing):
    """As torch.save and torch.load leave it."""
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("options", [None, *OPTIONS], ids=str)
@pytest.mark.parametrize("at", (4, 5, 6))
def test_it_goes_on_to_the_bit(options, at):
    """Each rank has saved its own, in the middle of an interval as at its end."""

    def body(comm):
        model, optimizer, block = made(comm, options)
        with block:
            run(model, optimizer, comm, range(at))
            states = stored([each.state_dict() for each in (model, optimizer, block)])
            run(model, optimizer, comm, range(at, 11))
        other, other_optimizer, other_block = made(comm, options)
        for each, state in zip((other, other_optimizer, other_block), states, strict=True):
            each.load_state_dict(state)
        with other_block:
            run(other, other_optimizer, comm, range(at, 11))
        return distance(other, model)

    assert dp.spawn(body, 2, mode="threads") == [0, 0]


@pytest.mark.parametrize("world", (1, 3))
def test_rank_0_alone_saves_and_another_world_goes_on(world):
    """state_dict() waits for nobody, and all ranks begin with what rank 0 had."""
    options = OPTIONS[2]

    def save(comm):
        model, optimizer, block = made(comm, options)
        states = None
        with block:
            run(model, optimizer, comm, range(5))
            if comm.rank == 0:
                states = stored([each.state_dict() for each in (model, optimizer, block)])
            run(model, optimizer, comm, range(5, 8))
        return states

    states = dp.spawn(save, 2, mode="threads")[0]

    def go_on(comm):
        everything = made(comm, options)
        for each, state in zip(everything, copy.deepcopy(states), strict=True):
            each.load_state_dict(state)
        model, optimizer, block = everything
        begun = copy.deepcopy(model.state_dict())
        with block:
            assert all(torch.equal(begun[name], p) for name, p in model.state_dict().items())
            run(model, optimizer, comm, range(5, 8))
        return model

    models = dp.spawn(go_on, world, mode="threads")
    assert all(distance(model, models[0]) == 0 for model in models)


def test_a_model_that_is_loaded_before_the_block_is_where_it_begins():
    """Without a state of the block: the outer parameters are the module's, when it is entered."""

    def body(comm):
        model, optimizer, block = made(comm, {})
        model.load_state_dict(Small(seed=99).state_dict())
        with block:
            pass
        with block:
            run(model, optimizer, comm, range(1))
        return distance(model, Small(seed=99))

    assert max(dp.spawn(body, 2, mode="threads")) < 0.2


def test_the_outer_optimizer_is_kept_from_block_to_block():
    """Its momentum, and what a scheduler makes of its learning rate."""

    def body(comm):
        model = Small()
        optimizer = inner_adamw(model.parameters())
        outer = outer_nesterov(model.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(outer, 1, gamma=0.5)
        for epoch in range(2):
            with dp.DiLoCo(model, optimizer, outer, 4, comm=comm):
                run(model, optimizer, comm, range(4 * epoch, 4 * epoch + 4))
            schedule.step()
        assert outer.param_groups[0]["lr"] == pytest.approx(0.7 / 4)
        assert len(outer.state) == 8
        once = Small()
        optimizer = inner_adamw(once.parameters())
        outer = outer_nesterov(once.parameters())
        with dp.DiLoCo(once, optimizer, outer, 4, comm=comm):
            run(once, optimizer, comm, range(4))
            outer.param_groups[0]["lr"] /= 2
            run(once, optimizer, comm, range(4, 8))
        return distance(model, once)

    assert dp.spawn(body, 2, mode="threads") == [0, 0]


def test_a_state_of_something_else():
    def body(comm):
        _, _, block = made(comm, {"fragments": 2})
        state = block.state_dict()
        with pytest.raises(dp.Unsupported, match="fragments=2, and this block has 1"):
            made(comm, {})[2].load_state_dict(state)
        other = nn.Linear(6, 40).double()
        with pytest.raises(dp.Unsupported, match=r"no weight of shape \[40, 6\]: it is of another"):
            made(comm, {"fragments": 2}, other)[2].load_state_dict(state)
        _, optimizer, local = made(comm, None)
        with pytest.raises(dp.Unsupported, match="LocalSGD: the state has no steps, syncs, moved"):
            local.load_state_dict(optimizer.state_dict())
        with pytest.raises(dp.Unsupported, match="DiLoCo: the state has no outer_parameters, out"):
            block.load_state_dict(local.state_dict())

    dp.spawn(body, 1, mode="threads")


def test_ranks_that_go_on_from_different_places():
    def begin_again(comm):
        _, _, block = made(comm, None)
        if comm.rank == 1:
            block.load_state_dict(block.state_dict())
        with pytest.raises(dp.Mismatch, match="'resumed=False' where rank 1 has 'resumed=True'"):
            block.__enter__()

    dp.spawn(begin_again, 2, mode="threads")

    def body(comm):
        model, optimizer, block = made(comm, None)
        with block:
            run(model, optimizer, comm, range(4))
            early = block.state_dict()
            run(model, optimizer, comm, range(4, 8))
        block.load_state_dict(early if comm.rank else block.state_dict())
        with pytest.raises(dp.Mismatch, match="'steps=8' where rank 1 has 'steps=4'"):
            block.__enter__()

    dp.spawn(body, 2, mode="threads")
