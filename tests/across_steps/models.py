"""Models that schedules across steps can go wrong with. No world divides their sizes."""

from itertools import pairwise

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.data_parallel.models import seeded

INPUTS, OUTPUTS = 6, 3


class Chain(nn.Module):
    """Layers that forward needs one after the other."""

    def __init__(self, width=19, layers=3):
        super().__init__()
        sizes = [INPUTS, *[width] * layers]
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in pairwise(sizes))
        self.norm = nn.LayerNorm(width)
        self.last = nn.Linear(width, OUTPUTS)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.last(self.norm(x))


class OtherWayRound(Chain):
    """Parameters are needed in another order than they were made in."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(reversed(self.layers))

    def forward(self, x):
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x))
        return self.last(self.norm(x))


class Unused(Chain):
    """A branch that no forward takes, and one that only inputs with a positive first number do."""

    def __init__(self):
        super().__init__()
        self.never = nn.Linear(19, 19)
        self.sometimes = nn.Linear(INPUTS, OUTPUTS)

    def forward(self, x):
        out = super().forward(x)
        return out + self.sometimes(x) if x[0, 0] > 0 else out


class Checkpointed(Chain):
    """Backward runs the forward of layers again."""

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=False))
        return self.last(self.norm(x))


class Tied(nn.Module):
    """The first layer's weights are needed again at the end, by no module's forward."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(INPUTS, 19)
        self.middle = nn.Linear(19, 19)
        self.out = nn.Linear(19, INPUTS, bias=False)
        self.out.weight = nn.Parameter(self.first.weight.detach().T.clone())
        self.last = nn.Linear(INPUTS, OUTPUTS)

    def forward(self, x):
        x = torch.tanh(self.middle(torch.tanh(self.first(x))))
        x = self.out(x) + nn.functional.linear(x, self.first.weight.T)
        return self.last(torch.tanh(x))


class Shared(nn.Module):
    """One parameter in two modules."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(INPUTS, 19)
        self.middle = nn.Linear(19, 19)
        self.again = nn.Linear(19, 19)
        self.again.weight = self.middle.weight
        self.last = nn.Linear(19, OUTPUTS)

    def forward(self, x):
        x = torch.tanh(self.middle(torch.tanh(self.first(x))))
        return self.last(torch.tanh(self.again(x)))


class Attention(nn.Module):
    """``out_proj`` is a module whose weights its parent uses: it is never called."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(INPUTS, 12)
        self.attention = nn.MultiheadAttention(12, 2, batch_first=True)
        self.last = nn.Linear(12, OUTPUTS)

    def forward(self, x):
        x = self.first(x).unsqueeze(0)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.last(torch.tanh(x.squeeze(0)))


def made(kind):
    return seeded(lambda: kind().double())
