"""Optimizers of tensors that are no parameters any more, and parameters of no optimizer."""

import copy
import gc
import warnings

import pytest
import torch
from torch import nn

import dpcore

SGD = torch.optim.SGD


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3))


def train(model, *optimizers, steps=6):
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(torch.full((2, 4), 1.0 + step)).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


def told_by(body):
    """The warnings and the notes of a rank alone."""

    def on_rank(comm):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            model = body(comm)
        mistakes = [str(one.message) for one in told if one.category is dpcore.MistakeWarning]
        return mistakes, list(model._mistakes.notes)

    gc.collect()  # models of earlier tests wait for an optimizer, too
    ((mistakes, notes),) = dpcore.spawn(on_rank, 1, mode="threads")
    return mistakes, notes


def test_an_optimizer_of_another_copy_is_told():
    def body(comm):
        module = net()
        optimizer = torch.optim.Adam(module.parameters())
        model = dpcore.DataParallel(copy.deepcopy(module), comm=comm)
        train(model, optimizer, steps=2)
        assert not optimizer.state  # it has changed nothing yet
        train(model, optimizer)
        return model

    (said,), _ = told_by(body)
    assert said.startswith(
        "rank 0: Adam steps 4 tensors of which none has a gradient, and none is "
    )
    assert "model 1 (Sequential), whose 2 backwards no optimizer has used. Make the opt" in said


@pytest.mark.parametrize("classes", [3, 5])
def test_a_head_that_is_replaced_after_the_optimizer_was_made_is_told(classes):
    def body(comm):
        module = net()
        optimizer = SGD(module.parameters(), lr=0.1)
        module[1] = nn.Linear(8, classes)
        model = dpcore.DataParallel(module, comm=comm)
        train(model, optimizer)
        return model

    (said,), _ = told_by(body)
    assert said.startswith("rank 0: SGD holds 2 tensors that are no parameters of model 1 (Sequent")
    assert "while 1.weight, 1.bias have gradients and no optimizer" in said


def test_it_is_an_error_if_asked_for():
    def body(comm):
        module = net()
        optimizer = SGD(module.parameters(), lr=0.1)
        module[1] = nn.Linear(8, 3)
        model = dpcore.DataParallel(module, comm=comm, mistakes="raise")
        with pytest.raises(dpcore.Error, match="SGD holds 2 tensors"):
            train(model, optimizer)

    dpcore.spawn(body, 1, mode="threads")


def test_parameters_of_no_optimizer_are_a_note():
    def body(comm):
        model = dpcore.DataParallel(net(), comm=comm)
        optimizer = SGD(model.module[0].parameters(), lr=0.1)
        train(model, optimizer, steps=3)
        assert not model._mistakes.notes  # another optimizer may follow
        train(model, optimizer)
        return model

    said, (note,) = told_by(body)
    assert not said
    assert note.startswith(
        "no optimizer steps 1.weight, 1.bias of model 1 (Sequential), whose grad"
    )


def test_tensors_of_another_kind_are_not_taken_for_the_replaced_ones():
    """It holds two tensors of something else that is not in use yet."""

    def body(comm):
        model = dpcore.DataParallel(net(), comm=comm)
        later = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4))]
        train(model, SGD([*model.module[0].parameters(), *later], lr=0.1))
        return model

    said, (note,) = told_by(body)
    assert not said
    assert note.endswith(
        ". SGD holds 2 tensors that are no parameters of the model and have no gradients"
    )


def test_refresh_looks_again():
    def body(comm):
        module = net()
        model = dpcore.DataParallel(module, comm=comm)
        optimizer = SGD(model.parameters(), lr=0.1)
        train(model, optimizer)
        module[1] = nn.Linear(8, 3)
        model.refresh()
        train(model, optimizer)
        return model

    (said,), _ = told_by(body)
    assert "SGD holds 2 tensors" in said


# ---- right programs --------------------------------------------------------------------------


def all_parameters(comm):
    model = dpcore.DataParallel(net(), comm=comm)
    train(model, SGD(model.parameters(), lr=0.1))
    return model


def an_optimizer_for_each_parameter(comm):
    model = dpcore.DataParallel(net(), comm=comm)
    train(model, *(SGD([parameter], lr=0.1) for parameter in model.parameters()))
    return model


def optimizers_in_backward(comm):
    from torch.distributed.optim import _apply_optimizer_in_backward

    module = net()
    _apply_optimizer_in_backward(SGD, module.parameters(), {"lr": 0.1})
    model = dpcore.DataParallel(module, comm=comm)
    train(model)
    return model


def steps_by_hand(comm):
    """Beside an optimizer that has nothing to step yet."""
    model = dpcore.DataParallel(net(), comm=comm)
    optimizer = SGD(nn.Linear(5, 5).parameters(), lr=0.1)
    for _ in range(4):
        train(model, steps=1)
        optimizer.step()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        model.zero_grad()
    return model


def a_model_without_a_wrapper_beside_it(comm):
    """A twin of the same shapes, whose optimizer often has nothing to step, and steps first."""
    model, plain = dpcore.DataParallel(net(), comm=comm), net()
    own, other = SGD(model.parameters(), lr=0.1), SGD(plain.parameters(), lr=0.1)
    for step in range(8):
        own.zero_grad()
        other.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        if step % 4 == 3:
            plain(torch.ones(2, 4)).sum().backward()
        other.step()
        own.step()
    return model


def frozen_and_thawed(comm):
    module = net()
    module[0].requires_grad_(False)
    model = dpcore.DataParallel(module, comm=comm)
    train(model, SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
    return model


def accumulation(comm):
    model = dpcore.DataParallel(net(), comm=comm)
    optimizer = SGD(model.parameters(), lr=0.1)
    for step in range(12):
        model(torch.ones(2, 4)).sum().backward()
        if step % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    return model


def zero1(comm):
    model = dpcore.DataParallel(net(), comm=comm, schedule="zero1")
    train(model, dpcore.DistributedOptimizer(torch.optim.Adam(model.parameters()), model))
    model.flush()
    return model


def dear(comm):
    model = dpcore.DataParallel(net(), comm=comm, schedule="dear")
    train(model, dpcore.DistributedOptimizer(torch.optim.Adam(model.parameters()), model))
    model.flush()
    return model


@pytest.mark.parametrize(
    "program",
    [
        all_parameters,
        an_optimizer_for_each_parameter,
        optimizers_in_backward,
        steps_by_hand,
        a_model_without_a_wrapper_beside_it,
        frozen_and_thawed,
        accumulation,
        zero1,
        dear,
    ],
    ids=lambda program: program.__name__,
)
def test_right_programs_hear_nothing(program):
    assert told_by(program) == ([], [])
