"""Gradients that a program keeps: the values are those of one process with the whole batch, with
gradients as views of buckets too. What can still be told apart is where they lie; the last tests
say how."""

import numpy as np
import pytest
import torch
from torch import nn

import dpcore
from tests.data_parallel.models import Small, batch, part, seeded
from tests.data_parallel.one_process import WORLD, backward, compare_with_one_process, trained

# ---- kept over another backward --------------------------------------------------------------

WAYS_TO_HOLD = {
    "tensor": lambda p: p.grad,
    "view": lambda p: p.grad.view(-1),
    "slice": lambda p: p.grad[1:],
    "detached": lambda p: p.grad.detach(),
    "data": lambda p: p.grad.data,
    "numpy": lambda p: p.grad.numpy(),
    "numpy of a view": lambda p: p.grad.view(-1)[1:].numpy(),
}


@pytest.mark.parametrize("hold", WAYS_TO_HOLD.values(), ids=WAYS_TO_HOLD)
@pytest.mark.parametrize("options", ({}, {"find_unused_parameters": True}, {"schedule": "flat"}))
def test_a_gradient_that_is_kept_keeps_its_numbers(hold, options):
    """Over the step in which buckets are laid out anew as well."""

    def run(model, inputs):
        tasks = []
        for step in range(5):
            model.zero_grad()
            backward(model, inputs(step))
            tasks.append([hold(p) for p in trained(model)])
        return [tensor for task in tasks for tensor in task]

    compare_with_one_process(run, **options)


def test_pcgrad_and_cosines():
    """Two losses over one model; the gradient of each is kept, then they are projected."""

    def run(model, inputs):
        optimizer = torch.optim.SGD(trained(model), lr=0.1)
        cosines = []
        for step in range(4):
            tasks = []
            for task in range(2):
                optimizer.zero_grad()
                backward(model, inputs(2 * step + task))
                tasks.append([p.grad for p in trained(model)])
            for p, first, second in zip(trained(model), *tasks, strict=True):
                along = (first * second).sum()
                cosines.append(torch.cosine_similarity(first.view(-1), second.view(-1), dim=0))
                p.grad = first + second - along.clamp(max=0) * first / first.square().sum()
            optimizer.step()
        return [*cosines, *(p.detach() for p in trained(model))]

    compare_with_one_process(run)


def test_one_of_many_kept_for_long():
    def run(model, inputs):
        history = []
        for step in range(6):
            model.zero_grad()
            backward(model, inputs(step))
            history.append(trained(model)[0].grad)
        return history

    compare_with_one_process(run)


def test_a_kept_gradient_that_is_given_back_goes_on_as_the_gradient():
    def run(model, inputs):
        backward(model, inputs(0))
        kept = [p.grad for p in trained(model)]
        model.zero_grad()
        backward(model, inputs(1))
        others = [p.grad for p in trained(model)]
        for p, grad in zip(trained(model), kept, strict=True):
            p.grad = grad
        backward(model, inputs(2))
        return [*kept, *others, *(p.grad for p in trained(model))]

    compare_with_one_process(run)


def test_what_is_held_of_a_gradient_that_stays_follows_it():
    """As in torch: the next backward adds to this very memory."""

    def run(model, inputs):
        backward(model, inputs(0))
        held = [(p.grad, p.grad.view(-1), p.grad.numpy()) for p in trained(model)]
        for step in range(1, 4):
            backward(model, inputs(step))
        return [tensor for group in held for tensor in group]

    compare_with_one_process(run)


class Halves(nn.Module):
    """``second`` is used when ``x`` says so by its first number."""

    def __init__(self):
        super().__init__()
        self.first, self.second = seeded(lambda: (nn.Linear(2, 2), nn.Linear(2, 2)))

    def forward(self, x, uses_second):
        return self.first(x).sum() + (self.second(x).sum() if uses_second else 0.0)


def test_a_kept_gradient_of_a_parameter_that_is_unused_next():
    def body(comm):
        model = dpcore.DataParallel(Halves(), comm=comm, find_unused_parameters=True)
        model(torch.ones(1, 2), True).backward()
        kept = model.module.second.weight.grad
        model.zero_grad()
        model(torch.ones(1, 2), False).backward()
        assert torch.equal(kept, torch.ones(2, 2))
        assert model.module.second.weight.grad is None

    dpcore.spawn(body, WORLD, mode="threads")


def test_gradients_of_a_rank_without_inputs_stay():
    """torch: a rank that has joined sends zeros from elsewhere."""

    def body(comm, as_view):
        model = dpcore.DataParallel(Halves(), comm=comm, gradient_as_bucket_view=as_view)
        with model.join():
            for _ in range(1 + comm.rank):
                model.zero_grad()
                model(torch.ones(1, 2), True).backward()
                kept = model.module.first.weight.grad.clone()
        assert torch.equal(model.module.first.weight.grad, kept)

    for as_view in (True, False):
        dpcore.spawn(body, WORLD, as_view, mode="threads")


@pytest.mark.parametrize("act", ("keeps", "assigns data", "has its own"))
def test_delayed_gradients_are_kept_and_found_as_well(act):
    """Those of delay_all_reduce_named_params."""

    def run(model, inputs, module):
        seen = []
        late = module.last.weight
        if act == "has its own":
            late.grad = torch.zeros_like(late)
        for step in range(4):
            backward(model, inputs(step))
            seen.append(late.grad if act == "keeps" else late.grad.clone())
            if act == "keeps":
                model.zero_grad()
            elif act == "assigns data":
                late.grad.data = late.grad.data.clamp(-0.1, 0.1)
        return seen

    def body(comm):
        module, alone = Small(), Small()
        model = dpcore.DataParallel(
            module,
            comm=comm,
            delay_all_reduce_named_params=[("last.weight", module.last.weight)],
            param_to_hook_all_reduce=module.first.weight,
        )
        got = run(model, lambda n: [part(t, comm) for t in batch(n)], module)
        for mine, other in zip(got, run(alone, batch, alone), strict=True):
            torch.testing.assert_close(mine, other)

    dpcore.spawn(body, WORLD, mode="threads")


# ---- what can be told apart ------------------------------------------------------------------


def part_addresses(model):
    found = {}
    for number in range(len(model.bucket_report())):
        _, members, parts = model._reducer.bucket(number)
        found.update({i: p.data_ptr() for i, p in zip(members, parts, strict=True)})
    return [found[i] for i in range(len(found))]


def test_plain_steps_copy_once_into_memory_that_stays_where_it_is():
    def body(comm):
        model = dpcore.DataParallel(Small(), comm=comm, bucket_cap_mb=0.01)
        optimizer = torch.optim.SGD(trained(model), lr=0.1)
        places = set()
        for step in range(6):
            optimizer.zero_grad()
            before = model.stats()["copies"]["alone"]
            backward(model, batch(step))
            assert model.stats()["copies"]["alone"] - before == len(trained(model))
            if step >= 2:  # buckets have their order
                places.add(tuple(p.grad.data_ptr() for p in trained(model)))
            optimizer.step()
        assert places == {tuple(part_addresses(model))}

    dpcore.spawn(body, WORLD, mode="threads")


def test_a_gradient_that_is_kept_moves():
    """It is the same tensor with the same numbers, at another address."""

    def body(comm):
        model = dpcore.DataParallel(nn.Linear(2, 2), comm=comm)
        model(torch.ones(1, 2)).sum().backward()
        grad = model.module.weight.grad
        before = grad.data_ptr()
        model.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        assert grad is not model.module.weight.grad
        assert grad.data_ptr() != before == model.module.weight.grad.data_ptr()

    dpcore.spawn(body, WORLD, mode="threads")


def test_the_bucket_moves_where_numpy_has_its_memory():
    def body(comm):
        model = dpcore.DataParallel(nn.Linear(2, 2), comm=comm)
        model(torch.ones(1, 2)).sum().backward()
        array = model.module.weight.grad.numpy()
        model.zero_grad()
        model(torch.full((1, 2), 2.0)).sum().backward()
        assert model.module.weight.grad.data_ptr() != array.ctypes.data
        assert (array == 1).all() and (model.module.weight.grad == 2).all()

    dpcore.spawn(body, WORLD, mode="threads")


def test_a_bare_address_shows_the_next_gradient():
    """DLPack's consumers and whoever called data_ptr(): nothing says that they have it."""

    def body(comm, as_view):
        model = dpcore.DataParallel(nn.Linear(2, 2), comm=comm, gradient_as_bucket_view=as_view)
        model(torch.ones(1, 2)).sum().backward()
        array = np.from_dlpack(model.module.weight.grad)
        model.zero_grad()
        model(torch.full((1, 2), 2.0)).sum().backward()
        return array.copy()

    for as_view, shown in ((True, 2), (False, 1)):
        for array in dpcore.spawn(body, WORLD, as_view, mode="threads"):
            assert (array == shown).all()


def test_an_array_outlives_model_and_communicator():
    def body(comm):
        model = dpcore.DataParallel(nn.Linear(2, 2), comm=comm)
        model(torch.ones(1, 2)).sum().backward()
        arrays = [np.from_dlpack(model.module.weight.grad), model.module.bias.grad.numpy()]
        model.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        return arrays

    for arrays in dpcore.spawn(body, WORLD, mode="threads"):
        assert all((array == 1).all() for array in arrays)
