"""The digest of parameters that a word has: the same number wherever the parameters lie."""

import torch
from torch import nn

import dpcore


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
