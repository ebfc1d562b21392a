"""Whose words an error is in, where a late rank is, and what became of a group beside this one."""

import ctypes
import functools
import mmap
import threading
import time

import numpy as np
import pytest
import torch

import dpcore as dp

from .over_tcp import over_tcp

with_and_without_memory = pytest.mark.parametrize(
    "run", [functools.partial(dp.spawn, mode="threads"), over_tcp], ids=["memory", "tcp"]
)


def caught(call):
    with pytest.raises(dp.Error) as raised:
        call()
    return raised.value


@with_and_without_memory
def test_a_failure_that_another_rank_found_is_in_that_ranks_words(run):
    def body(comm):
        if comm.rank == 0:
            return str(caught(lambda: comm.recv(torch.empty(100), 2, timeout=0.3)))
        if comm.rank == 1:
            return str(caught(comm.barrier))
        return str(caught(lambda: comm.recv(torch.empty(3), 1)))

    texts = run(body, 3)
    found = "recv of 400 bytes from rank 2 (tag 0) was not complete after 0.3 s"
    assert texts[0].startswith(f"rank 0: {found}"), texts
    for rank in (1, 2):
        assert texts[rank].startswith(f"rank {rank}: told by rank 0: {found}"), texts


@with_and_without_memory
def test_a_rank_inside_recv_is_not_one_that_has_called_nothing(run):
    def body(comm):
        if comm.rank == 0:
            return str(caught(lambda: comm.barrier(timeout=0.4)))
        caught(lambda: comm.recv(torch.empty(4), 0, tag=9))
        return None

    text = run(body, 2)[0]
    assert "rank 1 has not entered it: it is in recv of 16 bytes from rank 0 (tag 9)" in text, text


def test_a_rank_that_has_left_its_recv_was_seen_in_it():
    is_over = threading.Event()

    def body(comm):
        if comm.rank == 0:
            time.sleep(0.2)  # longer than a look
            comm.send(torch.ones(4), 1)
            text = str(caught(lambda: comm.barrier(timeout=0.9)))
            is_over.set()
            return text
        comm.recv(torch.empty(4), 0)
        is_over.wait(30)
        return None

    text = dp.spawn(body, 2, mode="threads")[0]
    assert "it was last seen in recv of 16 bytes from rank 0 (tag 0), " in text, text


@with_and_without_memory
def test_a_failure_in_one_group_is_what_its_siblings_hear_of(run):
    """Rank 0 gives up after an error in the group of ranks 0 and 1; rank 2 has no part in that."""

    def body(comm):
        pair = comm.split(0 if comm.rank < 2 else None)
        beside = comm.split(0, key=-comm.rank)
        if comm.rank == 2:
            return caught(lambda: beside.all_reduce(torch.ones(7)))
        problem = caught(lambda: pair.all_reduce(torch.ones(1 + comm.rank)))
        beside.close()
        return problem

    problems = run(body, 3)
    assert isinstance(problems[0], dp.Mismatch) and isinstance(problems[1], dp.Mismatch)
    assert isinstance(problems[2], dp.PeerLost)
    text = str(problems[2])
    assert "finalized and left after an error, and is needed for" in text
    assert "Mismatch in the group of ranks 0, 1 of init(): the ranks disagree" in text, text


def test_a_rank_that_left_is_lost_although_the_link_is_never_quiet():
    """On an emulated link: rank 0 always takes something from rank 1, and sends something to it."""

    def body(comm):
        if comm.rank == 2:
            return None
        other = 1 - comm.rank
        awaited = comm.recv(torch.empty(4), 2, async_op=True) if comm.rank == 0 else None

        def exchange():
            works = []
            while True:
                works.append(comm.send(torch.ones(30_000), other, async_op=True))
                works.append(comm.recv(torch.empty(30_000), other, async_op=True))
                if len(works) > 6:
                    works.pop(0).wait()

        problem = caught(exchange)
        assert awaited is None or awaited.is_completed()
        return problem

    for problem in dp.spawn(body, 3, mode="threads", timeout=8.0, link="50mbit,5ms")[:2]:
        assert isinstance(problem, dp.PeerLost), problem
        assert "finalized and left and is needed for recv of 16 bytes from rank 2" in str(problem)
        assert "train within model.join()" in str(problem)


# ---- late ranks ------------------------------------------------------------------------------

SMALL_AND_LARGE = {"small": 4, "staged": 30_000, "large": 1_000_000}


@with_and_without_memory
@pytest.mark.parametrize("count", SMALL_AND_LARGE.values(), ids=SMALL_AND_LARGE)
@pytest.mark.parametrize("call", ["all_reduce", "broadcast", "barrier", "gives"])
def test_a_rank_that_comes_after_the_others_gave_up_does_not_complete_the_operation(
    run, count, call
):
    """It would train one step more than they did. ``gives``: as the root it waits for nobody."""
    gave_up = threading.Event()

    def operation(comm, x, **options):
        if call == "barrier":
            comm.barrier(**options)
        elif call == "all_reduce":
            comm.all_reduce(x, **options)
        else:
            comm.broadcast(x, 0 if call == "broadcast" else 1, **options)

    def body(comm):
        x = torch.full((count,), comm.rank + 1.0)
        if comm.rank == 0 and call == "broadcast" and count == 4:
            comm.abort("this root has only given, and then fails")
            gave_up.set()
            return ""
        if comm.rank == 0:
            text = str(caught(lambda: operation(comm, x, timeout=0.3)))
            gave_up.set()
            return text
        assert gave_up.wait(30)
        text = str(caught(lambda: operation(comm, x)))
        assert x.unique().tolist() == [2.0]
        return text

    late = run(body, 2)[1]
    assert "gave up" in late or "was not complete after 0.3 s" in late, late


@with_and_without_memory
def test_a_rank_that_had_completed_what_the_others_gave_up_says_that_it_is_ahead(run):
    def body(comm):
        if comm.rank == 0:
            return str(caught(lambda: comm.broadcast(torch.ones(5), 1)))
        comm.broadcast(torch.ones(4), 1)  # it gives, and waits for nobody
        return str(caught(comm.barrier))

    texts = run(body, 2)
    assert "one step ahead" not in texts[0]
    assert "; this rank had completed that operation, so what it computed since" in texts[1], texts


# ---- memory of one's own ---------------------------------------------------------------------


def unmapped(bytes_):
    """An array, and a function after which its memory is gone."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    address = libc.mmap(None, bytes_, 3, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    array = np.ctypeslib.as_array((ctypes.c_uint8 * bytes_).from_address(address))
    array[:] = 1
    return array, lambda: libc.munmap(address, bytes_)


@pytest.mark.parametrize("direction", ["sends", "receives"])
def test_memory_of_ones_own_that_is_gone_is_not_another_ranks_death(direction):
    """Over TCP: the kernel finds it, not the connection."""
    bytes_ = 64 << 20
    is_gone = threading.Event()

    def body(comm):
        sends = (comm.rank == 0) == (direction == "sends")
        if comm.rank == 1:
            other = np.ones(bytes_, "u1")
            if sends:
                comm.send(other, 0, async_op=True)
            assert is_gone.wait(30)
            return str(caught(lambda: comm.barrier() if sends else comm.recv(other, 0)))
        array, unmap = unmapped(bytes_)
        if sends:
            work = comm.send(array, 1, async_op=True)  # more than the kernel's buffers take
            unmap()
        else:
            unmap()
            work = comm.recv(array, 1, async_op=True)
        is_gone.set()
        return str(caught(work.wait))

    own, others = over_tcp(body)
    assert own.startswith("rank 0: ") and f"the memory that this rank {direction}" in own, own
    assert others.startswith("rank 1: told by rank 0: ") and "this rank " + direction in others
