"""When the last gradient of a step was there."""

import time

import torch
from torch import nn

from dpcore.tools.compare.training.bare import LastGradient


def test_the_time_of_the_last_gradient():
    first, last = nn.Linear(2, 2), nn.Linear(2, 1)
    watched = LastGradient(nn.Sequential(first, last))
    last(first(torch.ones(1, 2))).sum().backward()  # of the first layer the gradient comes last
    watched.settle()
    watched.seconds_until(time.perf_counter())
    begin = time.perf_counter()
    last(first(torch.ones(1, 2))).sum().backward()
    end = time.perf_counter()
    time.sleep(0.05)
    since = watched.seconds_until(end)
    assert 0 < since < end - begin
    last(torch.ones(1, 2)).sum().backward()  # the layer that is watched takes no part
    assert watched.seconds_until(time.perf_counter()) == 0.0
