"""Ranks that other load has driven onto one processor: whoever waits lets the other one run."""

import os
import time

import pytest
import torch

import dpcore
from tests.faults.tries import in_time, timed

PROCESSORS = os.sched_getaffinity(0)
COUNT = 1000


def microseconds(comm):
    tensor = torch.zeros(1024)
    for _ in range(COUNT // 10):
        comm.all_reduce(tensor)
    begin = time.perf_counter()
    for _ in range(COUNT):
        comm.all_reduce(tensor)
    return (time.perf_counter() - begin) / COUNT * 1e6


def on_one_processor(comm):
    """They have met when each could have had its own."""
    os.sched_setaffinity(0, {min(PROCESSORS)})
    return microseconds(comm)


@timed
@pytest.mark.skipif(len(PROCESSORS) < 2, reason="with one processor ranks always sleep at once")
def test_nobody_looks_for_a_peer_that_cannot_run():
    """Where each looks as long as with a processor of its own it takes 90 us and more."""
    slowest = max(dpcore.spawn(on_one_processor, 2))
    in_time(slowest < 45, f"{slowest:.1f} us")
