"""When the last gradient of a step was there."""

import torch
from torch import nn

from dpcore.tools.compare.training.bare import LastGradient
from dpcore.tools.compare.training.clock import HostClock


def test_the_time_of_the_last_gradient():
    first, last = nn.Linear(2, 2), nn.Linear(2, 1)
    clock = HostClock()
    watched = LastGradient(nn.Sequential(first, last), clock)
    last(first(torch.ones(1, 2))).sum().backward()  # of the first layer the gradient comes last
    watched.settle()
    watched.taken()
    begin = clock.mark()
    last(first(torch.ones(1, 2))).sum().backward()
    end = clock.mark()
    at = watched.taken()
    assert 0 < clock.seconds(begin, at) < clock.seconds(begin, end)
    last(torch.ones(1, 2)).sum().backward()  # the layer that is watched takes no part
    assert watched.taken() is None
