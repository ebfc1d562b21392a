"""Processes forked off a rank (26): DataLoader workers and others. They share nothing with it."""

import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import cloudpickle
import pytest
import torch

import dpcore as dp
from dpcore.comm.launch.spawn import run_processes

from .tries import in_time, three_tries

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def in_a_child(body):
    """Runs ``body`` in a forked child; its traceback is the assertion's message here."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        text = ""
        try:
            body()
        except BaseException:  # it has to travel
            text = traceback.format_exc()
        os.write(writes, text.encode()[:60_000])
        os._exit(1 if text else 0)
    os.close(writes)
    with open(reads, "rb") as line:
        text = line.read().decode()
    assert os.waitpid(child, 0)[1] == 0 and not text, text


both_transports = pytest.mark.parametrize("transport", ["auto", "tcp"])


def results(body, world=2, transport="auto"):
    outcomes = run_processes(body, world, options={"transport": transport})
    for outcome in outcomes:
        assert outcome.error is None and outcome.exit_code == 0, outcome.traceback
    return [outcome.result for outcome in outcomes]


@pytest.mark.patient
@both_transports
def test_a_child_cannot_use_the_communicator_and_disturbs_nobody(transport):
    def body(comm):
        tensor = comm.empty(100_000).fill_(comm.rank + 1)
        comm.all_reduce(tensor)
        part = comm.split(0)

        def child():
            assert tensor.unique().tolist() == [3.0]  # the values are there
            tensor.fill_(77)  # and are the child's own
            for forked in (comm, part):
                for call in (
                    lambda c=forked: c.all_reduce(tensor),
                    lambda c=forked: c.barrier(),
                    lambda c=forked: c.empty(3),
                    lambda c=forked: c.split(0),
                    lambda c=forked: c.all_reduce(tensor, async_op=True),
                ):
                    with pytest.raises(dp.Error, match=r"forked after init\(\)"):
                        call()
                assert forked.closed
            dp.finalize()

        for _ in range(3):
            in_a_child(child)
        assert tensor.unique().tolist() == [3.0]
        comm.all_reduce(tensor)
        part.all_reduce(tensor)
        return tensor.unique().tolist()

    assert results(body, 2, transport) == [[12.0]] * 2


@pytest.mark.patient
def test_a_child_gets_addresses_only_where_there_is_memory():
    """A system that counts what might be written (vm.overcommit_memory=2) refuses more."""

    def body(comm):
        comm.empty(100_000).fill_(1)

        def child():
            maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
            own = [line for line in maps if "dpcore-arena" in " ".join(line)]
            assert [access for _, access, *_ in own] == ["rw-p"]
            begin, end = (int(address, 16) for address in own[0][0].split("-"))
            assert end - begin == comm_bytes

        comm_bytes = comm.stats()["arena"]["bytes"]
        in_a_child(child)

    results(body)


@pytest.mark.patient
@both_transports
def test_a_child_lets_go_of_what_it_inherits_while_its_parent_is_at_work(transport):
    """Whatever lock a thread of the parent holds at the fork stays locked in the child."""

    def body(comm):
        tensors = [comm.empty(1000) for _ in range(50)]
        groups = [comm.split(0) for _ in range(5)]
        stop = threading.Event()

        def take_memory():
            kept = []  # the arena has to grow, under its lock
            while not stop.is_set() and len(kept) < 12:
                kept.append(comm.empty(1 << 24))

        thread = threading.Thread(target=take_memory)
        thread.start()

        def child():
            signal.alarm(20)  # a lock would be waited for without end
            tensors.clear()
            groups.clear()

        for _ in range(20):
            in_a_child(child)
        stop.set()
        thread.join()

    results(body, transport=transport)


@pytest.mark.patient
@both_transports
def test_what_the_parent_does_next_is_not_disturbed_by_a_living_child(transport):
    def body(comm):
        tensor = comm.empty(50_000).fill_(1)
        children = []
        for _ in range(2):
            children.append(os.fork())
            if children[-1] == 0:
                tensor.fill_(1000)
                time.sleep(20)
                os._exit(0)
        for _ in range(50):
            comm.all_reduce(tensor, op="mean")
        work = comm.all_reduce(tensor, async_op=True)
        work.wait()
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        return tensor.unique().tolist()

    assert results(body, 3, transport) == [[3.0]] * 3


@pytest.mark.patient
@both_transports
def test_fork_with_operations_in_flight(transport):
    def body(comm):
        tensors = [comm.empty(1 << 18).fill_(1) for _ in range(6)]
        works = [comm.all_reduce(tensor, async_op=True) for tensor in tensors]

        def child():
            unfinished = [work.wait for work in works if not work.is_completed()]
            for call in (comm.barrier, lambda: comm.abort("never"), *unfinished):
                with pytest.raises(dp.Error, match="forked"):
                    call()

        in_a_child(child)
        for work in works:
            work.wait()
        return {value for tensor in tensors for value in tensor.unique().tolist()}

    assert results(body, 2, transport) == [{2.0}] * 2


@pytest.mark.patient
@both_transports
def test_data_loader_workers(transport):
    def body(comm):
        shared = comm.empty(64).copy_(torch.arange(64))
        loader = torch.utils.data.DataLoader(
            shared, batch_size=8, num_workers=2, multiprocessing_context="fork"
        )
        total = torch.zeros(1)
        for batch in loader:
            part = batch.sum().reshape(1)
            comm.all_reduce(part)
            total += part
        return total.item()

    assert results(body, 2, transport) == [2.0 * sum(range(64))] * 2


def test_children_make_a_communicator_of_their_own():
    """The copies of the parent's objects are dropped meanwhile, and take nothing along."""

    def body(comm):
        comm.all_reduce(torch.ones(10), async_op=True).wait()  # the parent has a progress thread
        inherited = [comm.empty(10), comm.split(0), comm]

        def child():
            new = dp.init(rank=comm.rank, world_size=2, init_method="children", timeout=5)
            ones = new.empty(1000).fill_(1)
            new.all_reduce(ones, async_op=True).wait()
            comm._native = comm._calls = None  # the last references
            inherited.clear()
            for _ in range(20):
                new.all_reduce(ones, op="mean")
                time.sleep(0.005)  # long enough to look after the other one
            new.all_reduce(ones, async_op=True).wait()
            assert ones.unique().tolist() == [4.0]
            if comm.rank == 1:
                os._exit(0)
            with pytest.raises(dp.PeerLost, match="rank 1"):
                new.barrier()
            dp.finalize()

        in_a_child(child)
        comm.barrier()

    results(body)


@three_tries
def test_the_launcher_hears_of_a_death_at_once_though_workers_live(tmp_path):
    note = tmp_path / f"{time.monotonic_ns()}"

    def body(comm):
        if comm.rank == 1:
            worker = os.fork()
            if worker == 0:
                time.sleep(60)
                os._exit(0)
            note.write_text(f"{worker} {time.monotonic()}")
            os.kill(os.getpid(), signal.SIGKILL)
        comm.barrier()

    outcomes = run_processes(body, 2)
    heard_at = time.monotonic()
    worker, died_at = note.read_text().split()
    os.kill(int(worker), signal.SIGKILL)  # it was there
    assert isinstance(outcomes[0].error, dp.PeerLost)
    assert outcomes[1].exit_code == -signal.SIGKILL
    in_time(heard_at - float(died_at) < 4)
