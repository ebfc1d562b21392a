"""Steps of a compiled model with more in them than a forward, a backward and an optimizer."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dpcore
from tests.compiled.test_cases import Layer, Layers

WIDTH = 256  # a weight is 0.25 MiB: a bucket each
LARGE = 512  # and 1 MiB, so that it may be born in its bucket


class Backwards(nn.Module):
    """Uses its layers in the reverse of the order in which they are registered."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x):
        for layer in self.layers[::-1]:
            x = torch.tanh(layer(x))
        return x


def two_forwards(comm):
    """As adversarial training does it: the first one is for the gradient of the input."""
    torch._dynamo.reset()
    model = dpcore.DataParallel(Backwards(), comm=comm, bucket_cap_mb=0.25, schedule="bucketed")
    run = torch.compile(model)
    lines = []
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for _ in range(5):
            model.zero_grad()
            x = torch.randn(2, WIDTH, requires_grad=True)
            torch.autograd.grad(run(x).mean(), x)
            loss = run(x.detach()).mean()
            lines += model.bucket_report().notes  # of an open step
            loss.backward()
    report = model.bucket_report()
    return [line.parameters[0] for line in report], [*lines, *report.notes]


def test_the_order_is_measured_where_a_step_has_two_forwards():
    for order, lines in dpcore.spawn(two_forwards, 2, timeout=200):
        assert order == [f"layers.{number}.weight" for number in range(4)]
        early = "torch.compile: 4 of 4 gradients left while their graph ran"
        assert {line for line in lines if "compile" in line} == {early}


def validates(comm, schedule, compiled):
    """Whose forwards are compiled between an optimizer's step and zero_grad()."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = dpcore.DataParallel(Layers(), comm=comm, schedule=schedule)
    optimizer = dpcore.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1), model)
    run = torch.compile(model) if compiled else model
    x = torch.full((4, 8), 1.0 + comm.rank)
    for step in range(8):
        loss = run(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step > 4:
            with torch.no_grad():
                run(torch.ones(step, 8))
    optimizer.zero_grad()
    run(x).mean().backward()
    return [parameter.detach().clone() for parameter in model.module.parameters()]


@pytest.mark.parametrize("schedule", ["zero1", "zero2"])
def test_dynamo_may_look_at_a_gradient_that_is_in_parts(schedule):
    compiled, eager = (dpcore.spawn(validates, 2, schedule, way, timeout=200) for way in (1, 0))
    for one, other in zip(compiled, eager, strict=True):
        torch.testing.assert_close(one, other)


def large(comm):
    torch._dynamo.reset()
    model = dpcore.DataParallel(Layer(LARGE, LARGE, bias=False), comm=comm, schedule="bucketed")
    run = torch.compile(model)
    found = []
    for _ in range(4):
        model.zero_grad()
        run(torch.ones(2, LARGE)).sum().backward()
        found.append(dict(model.bucket_report().gradients))
    run(torch.ones(2, LARGE)).sum().backward()
    return found, dict(model.bucket_report().gradients)


def test_a_gradient_that_leaves_early_is_copied_and_the_report_says_so():
    fresh, added = dpcore.spawn(large, 2, timeout=200)[0]
    assert fresh[1:] == [{"announced": 1}] * 3
    assert added == {"kept": 1}


class Checkpointed(Layers):
    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


def not_heard(comm, way):
    torch._dynamo.reset()
    module = Checkpointed() if way == "checkpoint" else Layers()
    model = dpcore.DataParallel(module, comm=comm, schedule="bucketed")
    run = model
    if way == "checkpoint":
        for layer in module.layers:
            layer.compile()
    else:
        run = torch.compile(model)
    for _ in range(3):
        model.zero_grad()
        loss = run(torch.ones(2, 8, requires_grad=True)).mean()
        loss.backward(inputs=list(model.parameters()) if way == "inputs" else None)
    return [note for note in model.bucket_report().notes if "compile" in note]


@pytest.mark.filterwarnings("ignore:.*use_reentrant")
@pytest.mark.parametrize("way", ["checkpoint", "inputs"])
def test_gradients_that_come_at_the_end_were_not_compiled_before_wrapping(way):
    for notes in dpcore.spawn(not_heard, 2, way, timeout=200):
        (note,) = notes
        assert "before it was wrapped" not in note
        assert "re-entrant checkpoint" in note and "backward(inputs=...)" in note
