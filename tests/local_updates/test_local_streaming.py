"""Fragments that are sent one after the other, awaited later, and packed into int8."""

import pytest
import torch

import dpcore as dp
from dpcore.ddp.local_updates.fragments import cut
from tests.data_parallel.models import Small
from tests.local_updates.test_local_values import FAR, NEAR, diloco, of_all_ranks
from tests.local_updates.twin import (
    STEPS,
    Twin,
    distance,
    inner_sgd,
    loss_of,
    names_of,
    outer_nesterov,
    outer_sgd,
    train,
)

SYNC_EVERY = 4


def fragments_of(count):
    """Names, cut as DiLoCo does."""
    model = Small()
    name_of = {id(p): name for name, p in model.named_parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    return [[name_of[id(p)] for p in part.parameters] for part in cut(trained, count)]


def streaming_twin(world, count, delay, alpha, steps=STEPS - 1):
    """Without the end of the block: up to the last step before an interval ends."""
    ends = [(i + 1) * SYNC_EVERY // count for i in range(count)]
    due = [{end + SYNC_EVERY * turn for turn in range(3)} for end in ends]
    twin = Twin(world, inner_sgd, outer_nesterov, fragments_of(count), due, delay, alpha)
    return twin.run(steps)


@pytest.mark.parametrize("world", (1, 2, 3, 4))
@pytest.mark.parametrize(
    ("count", "delay", "alpha"), [(2, 0, 0.0), (4, 0, 0.0), (1, 3, 0.0), (2, 1, 0.0), (2, 1, 0.5)]
)
def test_streaming_is_its_twin(world, count, delay, alpha):
    """On each rank, in the middle of an interval, when ranks differ."""

    def body(comm):
        model = Small(seed=7 + comm.rank)
        optimizer = inner_sgd(model.parameters())
        outer = outer_nesterov(model.parameters())
        block = dp.DiLoCo(
            model, optimizer, outer, SYNC_EVERY, count, delay,
            fragment_update_alpha=alpha, comm=comm,
        )  # fmt: skip
        found = Small()
        with block:
            for step in range(STEPS - 1):
                optimizer.zero_grad()
                loss_of(model, comm.rank, comm.world_size, step).backward()
                optimizer.step()
            found.load_state_dict(model.state_dict())
        return found, model

    twins = streaming_twin(world, count, delay, alpha)
    outcomes = dp.spawn(body, world, mode="threads")
    for (found, at_the_end), twin in zip(outcomes, twins, strict=True):
        assert distance(found, twin) < NEAR
        assert distance(at_the_end, outcomes[0][1]) == 0
    if delay:  # another share would be seen
        other = 0.0 if alpha else 0.5
        assert distance(outcomes[0][0], streaming_twin(world, count, delay, other)[0]) > FAR


def test_fragments_are_neighbours_of_about_one_size():
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (5, 100, 5, 5, 90, 10, 1)]
    assert [part.sizes for part in cut(parameters, 2)] == [[5, 100, 5], [5, 90, 10, 1]]
    assert [part.elements for part in cut(parameters, 7)] == [5, 100, 5, 5, 90, 10, 1]
    assert [part.sizes for part in cut(parameters[:2], 2)] == [[5], [100]]


def test_a_fragment_travels_while_the_next_step_is_computed():
    """Over a link on which it takes 100 ms: the step that sends it does not wait."""

    def body(comm):
        model = torch.nn.Linear(250, 250, bias=False)  # 250 kB
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"fragments": 1, "fragment_sync_delay": 2, "comm": comm}
        with dp.DiLoCo(model, optimizer, outer_sgd(model.parameters()), 4, **options) as block:
            before, seen = model.weight.detach().clone(), []
            model.weight.grad = torch.full_like(model.weight, comm.rank + 1.0)
            for _ in range(6):
                optimizer.step()
                under_way = block._flight is not None and not block._flight.work.is_completed()
                seen.append((under_way, round((before - model.weight).mean().item(), 4)))
        return seen

    first, second = dp.spawn(body, 2, mode="threads", link="20mbit")
    # Sent after step 4; after step 6 both go on from the mean of 0.4 and 0.8.
    assert first[3] == (True, 0.4) and second[3] == (True, 0.8)
    assert first[4][0] and first[4][1] == 0.5
    assert first[5] == second[5] == (False, 0.6)


# ---- bits=8 ----------------------------------------------------------------------------------


@pytest.mark.parametrize("world", (1, 2, 3, 4))
def test_int8_is_off_by_less_than_a_254th_of_the_way(world):
    """After one sync, in each parameter, of the longest way that a rank has gone."""

    def body(comm):
        start = Small()
        models = {}
        for bits in (32, 8):
            model = Small()
            optimizer = inner_sgd(model.parameters())
            block = dp.DiLoCo(model, optimizer, outer_sgd(model.parameters()), 4, bits=bits)
            train(block, model, optimizer, comm, range(4))
            models[bits] = model
        local = Small()
        optimizer = inner_sgd(local.parameters())
        for step in range(4):
            optimizer.zero_grad()
            loss_of(local, comm.rank, comm.world_size, step).backward()
            optimizer.step()
        pairs = zip(local.parameters(), start.parameters(), strict=True)
        way = torch.tensor([max((p - q).abs().max().item() for p, q in pairs)])
        comm.all_reduce(way, "max")
        off = max(
            (p - q).abs().max().item()
            for p, q in zip(models[8].parameters(), models[32].parameters(), strict=True)
        )
        return models[8], off / way.item()

    outcomes = dp.spawn(body, world, mode="threads")
    for model, off in outcomes:
        assert distance(model, outcomes[0][0]) == 0
        assert 1e-5 < off <= 1 / 254 + 1e-6


def test_int8_training_stays_near():
    exact = of_all_ranks(lambda comm: diloco(comm, outer_nesterov, 2), 3)
    packed = of_all_ranks(lambda comm: diloco(comm, outer_nesterov, 2, bits=8), 3)
    assert 1e-6 < distance(packed, exact) < 0.01


@pytest.mark.parametrize(("world", "share"), [(2, 0.25), (4, 0.5)])
def test_int8_sends_fewer_bytes(world, share):
    def body(comm):
        sent = []
        for bits in (32, 8):
            model = torch.nn.Linear(256, 256)
            optimizer = inner_sgd(model.parameters())
            block = dp.DiLoCo(
                model, optimizer, outer_sgd(model.parameters()), 4, bits=bits, comm=comm
            )
            model.weight.grad = torch.ones_like(model.weight)
            with block:
                before = bytes_sent(comm)
                for _ in range(4):
                    optimizer.step()
                sent.append(bytes_sent(comm) - before)
        return sent

    for exact, packed in dp.spawn(body, world, mode="threads", link="10gbit"):
        assert packed / exact == pytest.approx(share, rel=0.05)


def bytes_sent(comm):
    return sum(comm.stats()["sent"].values())


def test_names_are_those_that_are_trained():
    assert [name for part in fragments_of(3) for name in part] == names_of(Small())
