"""DataParallel against one process with the whole batch, in float64, to rounding."""

import pytest
import torch

import dpcore
from tests.data_parallel.models import (
    OPTIMIZERS,
    Small,
    assert_same_values,
    batch,
    part,
    train,
    train_alone,
)

SCHEDULES = ("bucketed", "sequential", "per_parameter", "flat")
CAPS_MB = (0.0, 0.005, 0.02, 100.0)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("world", (1, 2, 3, 4))
def test_training_is_that_of_one_process(world, optimizer):
    def body(comm):
        model = train(comm, OPTIMIZERS[optimizer], bucket_cap_mb=0.0005)
        assert_same_values(model.module, train_alone(OPTIMIZERS[optimizer]))
        assert model.bucket_report().rebuilt
        return len(model.bucket_report())

    counts = dpcore.spawn(body, world, mode="threads")
    assert set(counts) == {counts[0]}
    assert counts[0] > 2


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_schedule_is_exact_between_processes(schedule):
    def body(comm):
        model = train(comm, OPTIMIZERS["momentum"], schedule=schedule)
        assert_same_values(model.module, train_alone(OPTIMIZERS["momentum"]))
        assert model.backend == "native"
        return comm.stats()

    for stats in dpcore.spawn(body, 2):
        assert stats["all_reduce"]


@pytest.mark.parametrize("world", (3, 4))
def test_deterministic_gives_the_same_bits_for_any_bucket_size(world):
    def body(comm):
        bits = []
        for cap in CAPS_MB:
            model = train(
                comm, OPTIMIZERS["adamw"], bucket_cap_mb=cap, deterministic=True, model=Small()
            )
            bits.append([p.detach().view(torch.int64).clone() for p in model.parameters()])
        for other in bits[1:]:
            assert all(map(torch.equal, bits[0], other))
        return [p.tolist() for p in bits[0]]

    of_ranks = dpcore.spawn(body, world, mode="threads", algorithm="ring")
    assert all(of_rank == of_ranks[0] for of_rank in of_ranks)


def test_without_deterministic_a_ring_depends_on_the_buckets():
    """Or else the test above would show nothing."""

    def body(comm):
        bits = set()
        for cap in CAPS_MB:
            model = train(comm, OPTIMIZERS["adamw"], bucket_cap_mb=cap, model=Small())
            bits.add(tuple(p.detach().sum().item() for p in model.parameters()))
        return len(bits)

    assert min(dpcore.spawn(body, 3, mode="threads", algorithm="ring")) > 1


@pytest.mark.parametrize("as_view", (True, False))
@pytest.mark.parametrize("to_none", (True, False))
def test_accumulation_under_no_sync(as_view, to_none):
    """Two halves of each rank's part, averaged once: the gradient of the whole."""

    def body(comm):
        alone = Small()
        model = dpcore.DataParallel(
            Small(), comm=comm, bucket_cap_mb=0.01, gradient_as_bucket_view=as_view
        )
        for step in range(4):
            x, y = batch(step)
            alone.zero_grad(set_to_none=to_none)
            (alone(x) - y).square().sum().backward()
            model.zero_grad(set_to_none=to_none)
            halves = list(zip(part(x, comm).chunk(2), part(y, comm).chunk(2), strict=True))
            with model.no_sync():
                (model(halves[0][0]) - halves[0][1]).square().sum().backward()
                local = model.module.last.weight.grad.clone()
            (model(halves[1][0]) - halves[1][1]).square().sum().backward()
            assert not torch.equal(local, model.module.last.weight.grad)
            for mine, reference in zip(model.module.parameters(), alone.parameters(), strict=True):
                if reference.grad is not None:
                    torch.testing.assert_close(mine.grad * comm.world_size, reference.grad)

    dpcore.spawn(body, 2, mode="threads")


def test_a_rebuild_keeps_gradients_that_are_being_accumulated():
    """Buckets are rebuilt at the second forward: the first one's gradients are in the old ones."""

    def body(comm):
        alone = Small()
        model = dpcore.DataParallel(Small(), comm=comm, bucket_cap_mb=0.01)
        for step in range(3):  # never zeroed
            x, y = batch(step)
            (alone(x) - y).square().sum().backward()
            (model(part(x, comm)) - part(y, comm)).square().sum().backward()
        assert model.bucket_report().rebuilt
        for mine, reference in zip(model.module.parameters(), alone.parameters(), strict=True):
            if reference.grad is not None:
                torch.testing.assert_close(mine.grad * comm.world_size, reference.grad)

    dpcore.spawn(body, 3, mode="threads")


def test_two_backwards_after_one_forward():
    """Both reach every parameter: the second one's gradients are averaged as well."""

    def body(comm):
        alone = Small()
        model = dpcore.DataParallel(Small(), comm=comm, bucket_cap_mb=0.01)
        for step in range(3):
            x, y = batch(step)
            alone.zero_grad()
            ((alone(x) - y).square().sum() + alone(x).sum()).backward()
            model.zero_grad()
            out = model(part(x, comm))
            (out - part(y, comm)).square().sum().backward(retain_graph=True)
            out.sum().backward()
            for mine, reference in zip(model.module.parameters(), alone.parameters(), strict=True):
                if reference.grad is not None:
                    torch.testing.assert_close(mine.grad * comm.world_size, reference.grad)

    dpcore.spawn(body, 2, mode="threads")
