"""A module that is wrapped again while its first wrapper lives: after a failure, which keeps the
old one in tracebacks and variables, or because a program does so."""

import pytest
import torch
from torch import nn

import dpcore
from tests.data_parallel.models import Small, assert_same_values, batch, part, train_alone


def sgd(parameters):
    return torch.optim.SGD([p for p in parameters if p.requires_grad], lr=0.1)


def step(comm, model, number, optimizer=None):
    x, y = (part(tensor, comm) for tensor in batch(number))
    if optimizer is not None:
        optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    if optimizer is not None:
        optimizer.step()


def error_of(call):
    with pytest.raises(dpcore.Error) as caught:
        call()
    return caught.value


def fail_in_backward(comm, model):
    """Rank 1 gives up when some buckets are on their way."""
    if comm.rank == 1:
        handle = model.module.shared.weight.register_hook(lambda _: comm.abort("out of memory"))
        problem = error_of(lambda: step(comm, model, 1))
        handle.remove()
        return problem
    return error_of(lambda: step(comm, model, 1))


def fail_before_backward(comm, model):
    """Forward has opened a step that no gradient came for."""
    x, y = (part(tensor, comm) for tensor in batch(1))
    loss = nn.functional.mse_loss(model(x), y)
    if comm.rank == 1:
        comm.abort("out of memory")
    return error_of(lambda: [comm.barrier(), loss.backward()])


def fail_between_steps(comm, model):
    if comm.rank == 1:
        comm.abort("out of memory")
    return error_of(comm.barrier)


@pytest.mark.parametrize("fail", (fail_in_backward, fail_before_backward, fail_between_steps))
def test_after_a_failure_a_new_wrapper_trains_while_the_old_one_lives(fail):
    def body(comm):
        module = Small()
        old = dpcore.DataParallel(module, comm=comm, bucket_cap_mb=0, schedule="bucketed")
        step(comm, old, 0)
        first = fail(comm, old)
        assert "out of memory" in str(first)
        dpcore.finalize()

        again = dpcore.init(
            rank=comm.rank, world_size=2, init_method="a second try", transport="inproc"
        )
        new = dpcore.DataParallel(module, comm=again, bucket_cap_mb=0, schedule="bucketed")
        optimizer = sgd(new.parameters())
        for number in range(3):
            step(again, new, number, optimizer)
        assert_same_values(module, train_alone(sgd, steps=3))

        problem = error_of(lambda: step(comm, old, 3))
        if fail is fail_in_backward:
            assert type(problem) is type(first)
            assert str(problem) == str(first)
            assert str(error_of(lambda: step(comm, old, 3))) == str(first)
        step(again, new, 3, optimizer)

    dpcore.spawn(body, 2, mode="threads")


def test_gradients_belong_to_the_wrapper_whose_forward_ran_last():
    """Both are in order: the other one sends nothing, and spoils nothing."""

    def body(comm):
        module = Small()
        wrappers = [
            dpcore.DataParallel(module, comm=comm, bucket_cap_mb=0, schedule="bucketed")
            for _ in range(2)
        ]
        buckets = len(wrappers[0].bucket_report())
        optimizer = sgd(module.parameters())
        for number in range(6):
            before = operations(comm)
            step(comm, wrappers[number % 2], number, optimizer)
            assert operations(comm) - before == buckets
        assert_same_values(module, train_alone(sgd, steps=6))

    dpcore.spawn(body, 2, mode="threads")


def operations(comm):
    return sum(path["operations"] for path in comm.stats().get("all_reduce", {}).values())
