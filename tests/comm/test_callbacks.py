"""What a program attaches to a future may do whatever the program does."""

import threading
import time

import pytest
import torch

import dpcore


def future_of_what_is_in_flight(comm, tensor):
    """The future of an all-reduce that is complete after ``let_go`` on all ranks."""
    work = comm.all_reduce(tensor, async_op=True) if comm.rank == 0 else None
    future = None if work is None else work.get_future()
    assert work is None or not work.is_completed()

    def let_go():
        if comm.rank == 0:
            comm.send(torch.ones(1), 1)
        else:
            comm.recv(torch.empty(1), 0)
            comm.all_reduce(tensor)

    return future, let_go


@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_a_callback_may_call_collectives(mode):
    def body(comm):
        first, second, third = (torch.ones(3) for _ in range(3))

        def again(future):
            comm.all_reduce(future.value()[0])
            inner = comm.all_reduce(second, async_op=True).get_future()
            return inner.then(lambda done: comm.all_reduce(third)).wait()

        future, let_go = future_of_what_is_in_flight(comm, first)
        if comm.rank == 0:
            chained = future.then(again)
            let_go()
            chained.wait()
        else:
            let_go()
            for tensor in (first, second, third):
                comm.all_reduce(tensor)
        assert [t.tolist() for t in (first, second, third)] == [[4.0] * 3, [2.0] * 3, [2.0] * 3]

    dpcore.spawn(body, 2, mode=mode)


def test_deadlines_are_watched_while_a_callback_runs():
    def body(comm):
        future, let_go = future_of_what_is_in_flight(comm, torch.ones(3))
        if comm.rank == 1:
            let_go()
            with pytest.raises(dpcore.Error):
                comm.recv(torch.ones(1), 0, tag=7)  # ends with what rank 0 finds
            return
        entered, leave = threading.Event(), threading.Event()

        def callback(_):
            entered.set()
            assert leave.wait(60)

        chained = future.then(callback)
        let_go()
        assert entered.wait(60)
        late = comm.recv(torch.ones(1), 1, tag=9, async_op=True, timeout=0.3)
        end = time.monotonic() + 60
        while not late.is_completed():
            assert time.monotonic() < end
            time.sleep(0.01)
        assert isinstance(late.exception(), dpcore.Timeout)
        leave.set()
        chained.wait()

    dpcore.spawn(body, 2, mode="threads")


def test_a_work_has_one_future():
    def body(comm):
        future, let_go = future_of_what_is_in_flight(comm, torch.ones(3))
        let_go()
        if comm.rank == 0:
            future.wait()
        work = comm.all_reduce(torch.ones(3), async_op=True)
        assert work.get_future() is work.get_future()
        assert work.get_future().wait()[0].tolist() == [2.0] * 3

    dpcore.spawn(body, 2, mode="threads")


def test_close_lets_callbacks_end():
    def body(comm):
        seen = []
        future, let_go = future_of_what_is_in_flight(comm, torch.ones(3))
        if comm.rank == 0:
            chained = future.then(lambda done: (time.sleep(0.05), seen.append(done.value())))
            let_go()
            comm.close()
            assert len(seen) == 1 and chained.done()
        else:
            let_go()

    dpcore.spawn(body, 2, mode="threads")
