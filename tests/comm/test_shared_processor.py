"""Ranks that other load has driven onto one processor: whoever waits lets the other one run. And
beside a program that computes, the thread that drives operations need not wait for its turn."""

import contextlib
import ctypes
import os
import subprocess
import sys
import time
from pathlib import Path

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


@contextlib.contextmanager
def busy(processors):
    """A busy loop on each."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in processors]
    try:
        for loop, processor in zip(loops, processors, strict=True):
            os.sched_setaffinity(loop.pid, {processor})
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def all_reduces_until_apart(comm):
    """Rank 0 has to stay where both begin; rank 1 may go, and does not know of it."""
    where = ctypes.CDLL(None).sched_getcpu
    os.sched_setaffinity(0, {min(PROCESSORS)})
    comm.barrier()
    if comm.rank == 1:
        os.sched_setaffinity(0, PROCESSORS)
    tensor, apart = torch.zeros(1024), torch.zeros(1)
    count = 0
    while count < COUNT and not apart[0]:
        comm.all_reduce(tensor)
        apart[0] = where() != min(PROCESSORS)
        comm.all_reduce(apart)
        count += 1
    return count, os.sched_getaffinity(0)


@pytest.mark.skipif(len(PROCESSORS) < 2, reason="there is no processor to go to")
def test_ranks_that_meet_again_and_again_on_one_processor_part():
    with busy(PROCESSORS - {min(PROCESSORS)}):
        (count, stays), (_, goes) = dpcore.spawn(all_reduces_until_apart, 2)
    assert count < COUNT
    assert (stays, goes) == ({min(PROCESSORS)}, PROCESSORS)


SCHED_GETATTR = 315 if os.uname().machine == "x86_64" else 275


def turns_of_progress_threads(comm):
    """Nanoseconds, of each thread of this process with the name, which it takes once its turns are
    as they will be."""
    work = comm.all_reduce(torch.zeros(1 << 20), async_op=True)
    ends_at = time.perf_counter() + 60
    named = []
    while not named and time.perf_counter() < ends_at:
        named = [
            int(thread)
            for thread in os.listdir("/proc/self/task")
            if Path(f"/proc/self/task/{thread}/comm").read_text() == "dpcore-progress\n"
        ]
    attributes = (ctypes.c_uint64 * 7)()  # sched_attr of the kernel: the fourth is the runtime
    found = []
    for thread in named:
        arguments = (SCHED_GETATTR, thread, attributes, ctypes.sizeof(attributes), 0)
        assert ctypes.CDLL(None).syscall(*arguments) == 0
        found.append(attributes[3])
    work.wait()
    return found


def test_the_progress_thread_takes_short_turns():
    """Where Linux knows them."""
    release = tuple(int(part) for part in os.uname().release.split(".")[:2])
    for turns in dpcore.spawn(turns_of_progress_threads, 2, link="1gbit"):
        assert len(turns) == 1
        assert (turns[0] == 100_000) == (release >= (6, 12))
