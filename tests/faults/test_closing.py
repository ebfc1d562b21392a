"""What the end of a communicator tells, whom it waits for, and whom it keeps waiting."""

import contextlib
import os
import sys
import threading
import time

import pytest
import torch

import dpcore as dp
from dpcore.base.processes import is_running
from dpcore.comm.launch.spawn import run_processes

from .over_tcp import over_tcp

NEVER = "recv of 400 bytes from rank 1 (tag 0) was not complete"


def with_a_recv_that_nobody_answers(body):
    """Runs ``body(work)`` on rank 0, which awaits a message; rank 1 lives and sends none."""
    is_over = threading.Event()

    def rank(comm):
        if comm.rank == 1:
            is_over.wait(60)
            return None
        try:
            return body(comm.recv(torch.empty(100), 1, async_op=True, timeout=600.0))
        finally:
            is_over.set()

    return dp.spawn(rank, 2, mode="threads", timeout=0.3)[0]


def test_finalize_raises_what_never_ended_and_names_who_did_not_come():
    def body(work):
        with pytest.raises(dp.Timeout) as raised:
            dp.finalize()
        dp.finalize()  # it was told
        with pytest.raises(dp.Timeout) as again:
            work.wait()
        assert str(again.value) == str(raised.value)
        return str(raised.value)

    text = with_a_recv_that_nobody_answers(body)
    assert text.startswith(f"rank 0: {NEVER} when close() had waited"), text
    assert "nothing with this tag came from rank 1" in text


def test_memory_of_a_group_stays_while_a_rank_may_look_at_it(tmp_path):
    """Rank 1 leaves it and ends: that is one rank, not two."""

    def wait_for(condition):
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def body(comm):
        group = comm.split(0)
        group.barrier()
        if comm.rank == 1:
            group.close()
            (tmp_path / "new").write_text(str(os.getpid()))
            (tmp_path / "new").rename(tmp_path / "ended")
        elif comm.rank == 2:
            wait_for((tmp_path / "closed").exists)
        else:
            wait_for((tmp_path / "ended").exists)
            process = int((tmp_path / "ended").read_text())
            wait_for(lambda: not is_running(process))
            before = comm.stats()["arena"]["used"]
            group.close()
            after = comm.stats()["arena"]["used"]
            (tmp_path / "closed").touch()
            return before, after
        return None

    before, after = run_processes(body, 3)[0].result
    assert after == before > 0


def test_close_raises_what_failed_and_nobody_waited_for():
    def body(comm):
        if comm.rank == 0:
            comm.all_reduce(torch.ones(4), async_op=True)
        else:
            comm.all_reduce(torch.ones(5), async_op=True)
        with pytest.raises(dp.Mismatch, match="the ranks disagree at operation 0"):
            comm.close()
        assert comm.closed
        comm.close()

    dp.spawn(body, 2, mode="threads")


def test_what_was_raised_once_is_not_raised_again():
    def body(comm):
        work = comm.all_reduce(torch.ones(4 + comm.rank), async_op=True)
        with pytest.raises(dp.Mismatch):
            work.wait()
        dp.finalize()

    dp.spawn(body, 2, mode="threads")


def test_what_exception_returned_is_not_raised_again():
    def body(comm):
        work = comm.all_reduce(torch.ones(4 + comm.rank), async_op=True)
        while not work.is_completed():
            time.sleep(0.001)
        assert isinstance(work.exception(), dp.Mismatch)
        dp.finalize()

    dp.spawn(body, 2, mode="threads")


def test_finalize_in_a_finally_lets_the_first_exception_go_on():
    def body(work):
        with pytest.raises(ValueError, match="no more data") as raised:
            try:
                raise ValueError("no more data")
            finally:
                dp.finalize()
        if sys.version_info >= (3, 11):
            assert NEVER in "".join(raised.value.__notes__)

    with_a_recv_that_nobody_answers(body)


def test_dropping_a_communicator_does_not_keep_other_ranks_from_python():
    """Rank 0 drops it with a receive in flight, and waits for the message as ``close`` does; rank 1
    needs Python to send it."""
    drops = threading.Event()

    def body(comm):
        if comm.rank == 0:
            comm.recv(torch.empty(4), 1, async_op=True)
            drops.set()
            return None
        drops.wait()
        time.sleep(0.2)  # rank 0 is in its destructor now, or will be: nothing depends on it
        began = time.monotonic()
        comm.send(torch.ones(4), 0)
        return time.monotonic() - began

    began = time.monotonic()
    results = over_tcp(body, timeout=40.0)
    assert isinstance(results[1], float), results
    assert time.monotonic() - began < 20


def test_two_ranks_close_with_unread_data_between_them():
    """Neither kernel can hand over more until the other rank reads; both are closing."""

    def body(comm):
        block = torch.ones(1 << 20)
        comm.barrier()
        for _ in range(16):
            comm.send(block, 1 - comm.rank, tag=1, async_op=True)
        began = time.monotonic()
        with contextlib.suppress(dp.PeerLost):  # nobody receives what the other rank sends
            comm.close()
        return time.monotonic() - began

    for seconds in over_tcp(body, timeout=40.0):
        assert seconds < 20
