"""Gradients that a program keeps, and gradients in memory of its own: the values are those of one
process with the whole batch, with gradients as views of buckets too. What can still be told apart
is where they lie; the last tests say how."""

import numpy as np
import pytest
import torch
from torch import nn

import dpcore
from tests.data_parallel.models import Small, batch, part, seeded

WORLD = 2
WIDTH = 8


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def compare_with_one_process(run, make=Small, **options):
    """``run(model, inputs)`` returns tensors; ``inputs(n)`` is the rank's part of batch ``n``."""

    def body(comm):
        model = dpcore.DataParallel(make(), comm=comm, **{"bucket_cap_mb": 0.01, **options})
        got = run(model, lambda n: [part(t, comm) for t in batch(n)])
        wanted = run(make(), batch)
        for number, (mine, other) in enumerate(zip(got, wanted, strict=True)):
            torch.testing.assert_close(
                torch.as_tensor(mine), torch.as_tensor(other), msg=lambda m, n=number: f"{n}: {m}"
            )
        return model

    dpcore.spawn(body, WORLD, mode="threads")


def backward(model, x_and_y):
    x, y = x_and_y
    (model(x) - y).square().mean().backward()


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


# ---- memory of the program's -----------------------------------------------------------------


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


OWN_MEMORY = (
    views_of_one_flat_tensor,
    arrays_of_numpy,
    tensors_made_before,
    tensors_that_are_shared,
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
