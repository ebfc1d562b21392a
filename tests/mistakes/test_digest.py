"""The digest of parameters that a word has: the same number wherever the parameters lie."""

import torch
from torch import nn

import dpcore
from tests.mistakes.here import Net, loss_of
from tests.mistakes.running import over_dpcore


class Odd(nn.Module):
    """Types, sizes and strides of every kind."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.narrow = nn.Parameter(torch.randn(7, 33).bfloat16())
        self.wide = nn.Parameter(torch.randn(101, dtype=torch.float64))
        self.turned = nn.Parameter(torch.randn(6, 40).t())
        self.pairs = nn.Parameter(torch.randn(19, dtype=torch.complex64))
        self.many = nn.ParameterList(nn.Parameter(torch.randn(3, 30)) for _ in range(90))


def test_torchs_operations_give_the_number_of_the_memory():
    comm = dpcore.init(rank=0, world_size=1)
    try:
        reducer = dpcore.DataParallel(Odd(), comm=comm)._reducer
        digests = [reducer.digest(label, False) for label in range(40)]
        assert digests == [reducer.digest(label, True) for label in range(40)]
        assert len(set(digests)) == 40 and 0 not in digests
    finally:
        dpcore.finalize()


def test_each_line_is_read_in_its_turn():
    comm = dpcore.init(rank=0, world_size=1)
    try:
        model = dpcore.DataParallel(Odd(), comm=comm)
        before = [model._reducer.digest(label, False) for label in range(200)]
        with torch.no_grad():
            model.module.many[50][2, 29] += 1  # the last of its six lines
        after = [model._reducer.digest(label, False) for label in range(200)]
        assert any(one != other for one, other in zip(before, after, strict=True))
        assert before[0] == after[0]  # that of all reads the first lines
    finally:
        dpcore.finalize()


def sam_that_subtracts(here):
    """Weights are not those of before, by rounding, which is another one on each rank."""
    model = here.wrap(Net())
    optimizer = here.optimizer(model)
    for step in here.steps:
        optimizer.zero_grad()
        with model.no_sync():
            loss_of(model, here.batch(step)).backward()
        moves = [p.grad * (0.05 / p.grad.norm()) for p in model.parameters()]
        with torch.no_grad():
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.add_(move)
        optimizer.zero_grad()
        loss_of(model, here.batch(step)).backward()
        with torch.no_grad():
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.sub_(move)
        optimizer.step()
        yield


def test_parameters_that_have_moved_since_their_digest():
    (said,) = over_dpcore({"sam": sam_that_subtracts})["sam"][0]
    assert "elements, by up to" in said.text
    assert "now that every rank has changed its own since the optimizer's last step" in said.text
    assert "as in SAM, put back a copy" in said.text
