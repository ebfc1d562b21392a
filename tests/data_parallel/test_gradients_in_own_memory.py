"""Gradients in memory of the program's get the mean there. Those that only autograd knows move."""

import numpy as np
import pytest
import torch
from torch import nn

import dpcore
from tests.data_parallel.models import batch, part
from tests.data_parallel.one_process import WORLD, backward, compare_with_one_process, trained


def views_of_one_flat_tensor(parameters):
    flat = torch.zeros(sum(p.numel() for p in parameters), dtype=parameters[0].dtype)
    begin = 0
    for p in parameters:
        p.grad = flat[begin : begin + p.numel()].view_as(p)
        begin += p.numel()
    return flat


def arrays_of_numpy(parameters):
    arrays = [np.zeros(p.shape, dtype=np.float64) for p in parameters]
    for p, array in zip(parameters, arrays, strict=True):
        p.grad = torch.from_numpy(array)
    return arrays


def tensors_made_before(parameters):
    tensors = [torch.zeros_like(p) for p in parameters]
    for p, tensor in zip(parameters, tensors, strict=True):
        p.grad = tensor
    return tensors


def tensors_that_are_shared(parameters):
    tensors = [torch.zeros_like(p).share_memory_() for p in parameters]
    for p, tensor in zip(parameters, tensors, strict=True):
        p.grad = tensor
    return [tensor.view(-1) for tensor in tensors]


def what_a_consumer_of_dlpack_has(parameters):
    for p in parameters:
        p.grad = torch.zeros_like(p)
    return [torch.from_dlpack(p.grad) for p in parameters]


OWN_MEMORY = (
    views_of_one_flat_tensor,
    arrays_of_numpy,
    tensors_made_before,
    tensors_that_are_shared,
    what_a_consumer_of_dlpack_has,
)


@pytest.mark.parametrize("own", OWN_MEMORY, ids=lambda own: own.__name__)
@pytest.mark.parametrize("as_view", (True, False), ids=("views", "copies"))
@pytest.mark.parametrize("when", (0, 2), ids=("from the first", "later"))
def test_the_mean_comes_to_memory_of_the_programs(own, as_view, when):
    """Every step, and when gradients are added up without being sent."""

    def run(model, inputs):
        seen = []
        for step in range(6):
            if step == when:
                memory = own(trained(model))
                memory = memory if isinstance(memory, list) else [memory]
                grads = [p.grad for p in trained(model)]
            if step < when:
                model.zero_grad()
            elif step != 4:  # and once added to what is there
                for each in memory:
                    each[...] = 0
            if step % 2 and isinstance(model, dpcore.DataParallel):
                with model.no_sync():
                    backward(model, inputs(10 + step))
            elif step % 2:
                backward(model, inputs(10 + step))
            backward(model, inputs(step))
            if step >= when:
                seen += [torch.as_tensor(each).clone() for each in memory]
                seen += [p.grad.clone() for p in trained(model)]
                assert all(p.grad is g for p, g in zip(trained(model), grads, strict=True))
        return seen

    compare_with_one_process(run, gradient_as_bucket_view=as_view)


def test_a_gradient_that_a_hook_has_seen_is_the_one_that_is_averaged():
    """What a hook took of ``.grad`` in backward shows the mean afterwards."""

    def run(model, inputs):
        seen = {}

        def look(p):
            seen[p] = (p.grad, p.grad.view(-1))

        for p in trained(model):
            p.register_post_accumulate_grad_hook(look)
        for step in range(3):
            model.zero_grad()
            backward(model, inputs(step))
        return [tensor.flatten() for p in trained(model) for tensor in (p.grad, *seen[p])]

    # shared.weight comes twice in a backward, and is seen when both are there
    compare_with_one_process(run)


class Cat(nn.Module):
    """Autograd hands over gradients that are parts of one tensor, or the same one twice."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.ones(3, 6, dtype=torch.float64))
        self.b = nn.Parameter(torch.ones(5, 6, dtype=torch.float64))
        self.c = nn.Parameter(torch.ones(8, 6, dtype=torch.float64))

    def forward(self, x):
        weight = torch.cat([self.a, self.b]).view(-1) + self.c.view(-1)
        return (x @ weight.view(8, 6).t())[:, :3].square()


@pytest.mark.parametrize("set_to_none", (True, False))
def test_gradients_that_autograd_lets_share_memory(set_to_none):
    """In the bucket each has its own. In one process, what is added to one of them later comes to
    the other as well."""

    def body(comm):
        model = dpcore.DataParallel(Cat(), comm=comm)
        alone = Cat()
        for step in range(4):
            model.zero_grad(set_to_none)
            x, y = batch(step)
            backward(model, (part(x, comm), part(y, comm)))
            wanted = torch.autograd.grad((alone(x) - y).square().mean(), list(alone.parameters()))
            for p, average in zip(model.parameters(), wanted, strict=True):
                torch.testing.assert_close(p.grad, average)

    dpcore.spawn(body, WORLD, mode="threads")
