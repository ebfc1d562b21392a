"""What every implementation of data parallel training must do, as checks that run on a rank.

A check takes the rank's communicator and `wrap(module, comm)`, which gives something callable with
`module`, `parameters()`, `no_sync()` and, where backward alone does not finish, `finish()`. The
ladder of dpcore.reference, DataParallel and its mutants go through the same ones.
"""

import torch
from torch import nn

from tests.data_parallel.models import (
    OPTIMIZERS,
    Small,
    assert_same_values,
    batch,
    part,
    train_alone,
)


class Watching:
    """A communicator that remembers which all-reduces were started, for whoever looks."""

    def __init__(self, comm):
        self._comm = comm
        self.rank, self.world_size = comm.rank, comm.world_size
        self.log = []

    def all_reduce(self, tensor, op="sum", *, async_op=False):
        self.log.append(tensor.numel())
        return self._comm.all_reduce(tensor, op, async_op=async_op)

    def broadcast(self, tensor, root=0):
        self._comm.broadcast(tensor, root)

    def all_gather(self, output, input, *, sizes=None):
        self._comm.all_gather(output, input, sizes=sizes)


def backward(model, loss):
    loss.backward()
    getattr(model, "finish", lambda: None)()


def loss_of(model, step, comm):
    x, y = (part(tensor, comm) for tensor in batch(step))
    return (model(x) - y).square().sum() * comm.world_size


def assert_gradients_are_those_of(model, alone):
    for (name, mine), other in zip(
        model.module.named_parameters(), alone.parameters(), strict=True
    ):
        if other.grad is not None:
            torch.testing.assert_close(mine.grad, other.grad, msg=lambda text, n=name: n + text)


# ---- values ----------------------------------------------------------------------------------


def begins_with_the_values_of_rank_0(comm, wrap):
    model = wrap(Small(seed=7 + comm.rank), comm)
    assert_same_values(model.module, Small(seed=7))


def trains_as_one_process_with_the_whole_batch(comm, wrap):
    model = wrap(Small(seed=7 + comm.rank), comm)
    optimizer = OPTIMIZERS["momentum"]([p for p in model.parameters() if p.requires_grad])
    for step in range(4):
        optimizer.zero_grad()
        x, y = (part(tensor, comm) for tensor in batch(step))
        backward(model, nn.functional.mse_loss(model(x), y))
        optimizer.step()
    assert_same_values(model.module, train_alone(OPTIMIZERS["momentum"], steps=4))


def clips_what_is_averaged(comm, wrap):
    """Gradients are read between backward and the step."""
    model, alone = wrap(Small(), comm), Small()
    for step in range(3):
        x, y = batch(step)
        alone.zero_grad()
        model.module.zero_grad()
        nn.functional.mse_loss(alone(x), y).backward()
        backward(model, nn.functional.mse_loss(model(part(x, comm)), part(y, comm)))
        for module in (alone, model.module):
            nn.utils.clip_grad_norm_(module.parameters(), 0.01)
        assert_gradients_are_those_of(model, alone)


def averages_what_was_accumulated_under_no_sync(comm, wrap):
    model, alone = wrap(Small(), comm), Small()
    for step in range(3):
        alone.zero_grad()
        model.module.zero_grad()
        for number in (step, step + 10):
            x, y = batch(number)
            (alone(x) - y).square().sum().backward()
        with model.no_sync():
            loss_of(model, step, comm).backward()
            local = Small()
            local.load_state_dict(model.module.state_dict())
            loss_of(local, step, comm).backward()
            assert_gradients_are_those_of(model, local)
        backward(model, loss_of(model, step + 10, comm))
        assert_gradients_are_those_of(model, alone)


def adds_up_gradients_that_are_not_zeroed(comm, wrap):
    """Also over the step in which an implementation changes its buckets."""
    model, alone = wrap(Small(), comm), Small()
    for step in range(3):
        x, y = batch(step)
        (alone(x) - y).square().sum().backward()
        backward(model, loss_of(model, step, comm))
        assert_gradients_are_those_of(model, alone)


def brings_buffers_of_rank_0_before_forward(comm, wrap):
    model = wrap(nn.BatchNorm1d(6).double(), comm)
    for step in range(3):
        before = model.module.running_mean.clone()
        x = batch(step)[0] + comm.rank
        backward(model, model(x).square().sum())
        # What this rank has now follows from what rank 0 had before.
        others = [torch.empty_like(before) for _ in range(comm.world_size)]
        flat = torch.cat(others)
        comm.all_gather(flat, before)
        expected = 0.9 * flat.chunk(comm.world_size)[0] + 0.1 * x.mean(0)
        torch.testing.assert_close(model.module.running_mean, expected)


# ---- behaviour -------------------------------------------------------------------------------


def sends_every_gradient_once_per_step(comm, wrap):
    watching = Watching(comm)
    model = wrap(Small(), watching)
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    for step in range(3):
        watching.log.clear()
        backward(model, loss_of(model, step, comm))
        padding = 8 * len(watching.log) * len(list(model.parameters()))
        assert count <= sum(watching.log) <= count + padding


WIDE = 32  # a matrix is most of a bucket of the tests: there are several


class OtherWayRound(nn.Module):
    """The same layers on all ranks; on odd ones their gradients arrive in the opposite order."""

    def __init__(self, turned):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDE, WIDE, dtype=torch.float64) for _ in range(4))
        self.turned = turned

    def forward(self, x):
        for layer in reversed(self.layers) if self.turned else self.layers:
            x = layer(x)
        return x


def pairs_gradients_by_parameter_and_not_by_arrival(comm, wrap):
    model = wrap(OtherWayRound(comm.rank % 2 == 1), comm)
    x = torch.full((2, WIDE), comm.rank + 1.0, dtype=torch.float64)
    for _ in range(3):
        model.module.zero_grad()
        layers = [OtherWayRound(rank % 2 == 1) for rank in range(comm.world_size)]
        for rank, local in enumerate(layers):
            local.load_state_dict(model.module.state_dict())
            local(torch.full((2, WIDE), rank + 1.0, dtype=torch.float64)).sum().backward()
        backward(model, model(x).sum())
        for i, parameter in enumerate(model.module.parameters()):
            grads = [list(local.parameters())[i].grad for local in layers]
            torch.testing.assert_close(parameter.grad, sum(grads) / comm.world_size)


def sends_while_backward_goes_on(comm, wrap):
    """Only of those that promise it: something is under way when the first layer's gradient, the
    last to come, is computed."""
    watching = Watching(comm)
    model = wrap(Small(), watching)
    started = []
    model.module.first.bias.register_hook(lambda grad: started.append(len(watching.log)))
    for step in range(2):
        watching.log.clear()
        backward(model, loss_of(model, step, comm))
        assert started[step] > 0


# ---- faults that would pass in silence -------------------------------------------------------


def must_raise(call, text):
    try:
        call()
    except RuntimeError as problem:
        assert text in str(problem)
    else:
        raise AssertionError(f"nothing was raised about {text}")


def no_step_with_gradients_that_are_missing(comm, wrap):
    model = wrap(Small(), comm)
    optimizer = OPTIMIZERS["sgd"]([p for p in model.parameters() if p.requires_grad])
    model(part(batch(0)[0], comm))
    model.module.last(torch.ones(1, 40, dtype=torch.float64)).sum().backward()

    def step():
        comm.barrier()  # a rank that raises ends what the others do, here too on a device
        optimizer.step()

    must_raise(step, "first.weight")


def no_forward_with_a_parameter_that_nobody_averages(comm, wrap):
    model = wrap(Small(), comm)
    model.module.last = nn.Linear(40, 3).double()
    must_raise(lambda: model(part(batch(0)[0], comm)), "last.weight")


def no_model_that_differs(comm, wrap):
    module = Small()
    module.first.bias.requires_grad_(comm.rank == 0)
    must_raise(lambda: wrap(module, comm), "first.bias")


VALUES = (
    begins_with_the_values_of_rank_0,
    trains_as_one_process_with_the_whole_batch,
    clips_what_is_averaged,
    averages_what_was_accumulated_under_no_sync,
    adds_up_gradients_that_are_not_zeroed,
    brings_buffers_of_rank_0_before_forward,
)
GUARDS = (  # of DataParallel; the ladder has none
    no_step_with_gradients_that_are_missing,
    no_forward_with_a_parameter_that_nobody_averages,
    no_model_that_differs,
)
BEHAVIOUR = (
    sends_every_gradient_once_per_step,
    pairs_gradients_by_parameter_and_not_by_arrival,
    sends_while_backward_goes_on,
)
