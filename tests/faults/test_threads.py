"""A thread that cannot be started, as where a container limits how many there may be; and one that
keeps Python's lock."""

import ctypes
import sys
import threading
import time

import cloudpickle
import pytest
import torch

import dpcore as dp
from dpcore.comm.launch.spawn import run_processes

cloudpickle.register_pickle_by_value(sys.modules[__name__])

WHAT_TO_DO = "dpcore-{}.*can't be started.*pids limit"


def test_asynchronous_calls_raise_and_leave_the_communicator_usable():
    def body(comm):
        ones = torch.ones(3)
        for call in (
            lambda: comm.all_reduce(ones, async_op=True),
            lambda: comm.send(ones, 1 - comm.rank, async_op=True),
            lambda: comm.barrier(async_op=True),
        ):
            with pytest.raises(dp.Error, match=WHAT_TO_DO.format("progress")):
                call()
            comm.all_reduce(ones)  # synchronous calls need no thread
        if comm.rank == 0:
            work = comm.all_reduce(ones, async_op=True)
            with pytest.raises(dp.Error, match=WHAT_TO_DO.format("callback")):
                work.get_future()
            future = work.get_future()
            comm.send(torch.ones(1), 1)
            result = future.wait()[0].tolist()
        else:
            comm.recv(torch.empty(1), 0)
            comm.all_reduce(ones)
            result = ones.tolist()
        return result

    faults = ",".join(f"throw:thread:op{start}" for start in (0, 1, 2, 4))  # the fourth starts
    outcomes = run_processes(body, 2, timeout=30.0, environment={"DPCORE_FAULT": faults})
    for outcome in outcomes:
        assert outcome.error is None, outcome.traceback
        assert outcome.result == [16.0] * 3


def test_a_thread_that_keeps_pythons_lock_holds_up_no_other_rank():
    """As one does that writes a checkpoint: rank 0 waits, and looks for signals now and then."""

    def body(comm):
        tensors = [torch.ones(1 << 20) for _ in range(2)]
        comm.all_reduce(tensors[0], async_op=True).wait()  # the progress thread is there
        comm.barrier()
        if comm.rank == 0:
            threading.Timer(0.2, ctypes.PyDLL(None).sleep, (4,)).start()
            comm.all_reduce(tensors[1], async_op=True).wait()
            return None
        time.sleep(0.6)
        begin = time.monotonic()
        comm.all_reduce(tensors[1])
        return time.monotonic() - begin

    assert run_processes(body, 2)[1].result < 2
