"""Beginning and ending over and over (28), and what remains usable afterwards (32)."""

import gc
import os
import sys
import time

import cloudpickle
import pytest
import torch

import dpcore as dp
from dpcore.comm.launch.spawn import run_processes, run_threads

from . import leftovers
from .leftovers import growth, of_this_process
from .tries import in_time, three_tries

cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(leftovers)

WARM_UP = 40
both_transports = pytest.mark.parametrize("transport", ["auto", "tcp"])


def results(body, world=2, run=run_processes, **options):
    outcomes = run(body, world, **options)
    for outcome in outcomes:
        assert outcome.error is None, outcome.traceback
    return [outcome.result for outcome in outcomes]


@pytest.mark.patient
@pytest.mark.parametrize(
    ("run", "transport"),
    [(run_processes, "auto"), (run_processes, "tcp"), (run_threads, "inproc")],
    ids=["processes", "tcp", "threads"],
)
def test_init_and_finalize_200_times(run, transport):
    def body(comm):
        transport = comm.transport
        dp.finalize()
        for time_ in range(200):
            new = dp.init(
                rank=comm.rank, world_size=2, init_method=f"many-{comm.world_size}",
                transport=transport,
            )  # fmt: skip
            tensor = new.empty(50_000).fill_(1)
            work = new.all_reduce(tensor, async_op=True)
            new.all_reduce(torch.ones(10))
            work.wait()
            assert tensor[-1] == 2
            dp.finalize()
            del new, tensor, work
            if time_ == WARM_UP:
                gc.collect()
                before = of_this_process()
        gc.collect()
        return growth(before, of_this_process())

    if run is run_processes:
        assert results(body, options={"transport": transport}) == [{}, {}]
        return
    # Two ranks in one process never end at the same moment: the whole is measured from outside.
    results(body, run=run)
    before = of_this_process()
    results(body, run=run)
    for _ in range(20):  # a thread that was joined may still be on its way out
        if not growth(before, of_this_process()):
            break
        time.sleep(0.1)
    assert growth(before, of_this_process()) == {}


@pytest.mark.patient
@both_transports
def test_split_and_close_100_times(transport):
    def body(comm):
        for time_ in range(100):
            part = comm.split(comm.rank % 2, key=-comm.rank)
            tensor = part.empty(1000).fill_(1)
            part.all_reduce(tensor)
            assert tensor[0] == part.world_size
            part.all_reduce(torch.ones(50_000), async_op=True).wait()
            part.close()
            del part, tensor
            comm.barrier()
            if time_ == WARM_UP:
                gc.collect()
                before = {**of_this_process(), **comm.stats()["arena"]}
        gc.collect()
        return growth(before, {**of_this_process(), **comm.stats()["arena"]})

    for grown in results(body, 3, options={"transport": transport}):
        # What peers may still look at is kept for one more round; 60 rounds would be 126 MB. Only
        # a rank that closes before the others does so, which may happen late for the first time.
        assert grown.pop("used", (0, 0))[1] < 20e6
        before, after = grown.pop("bytes", (0, 0))
        assert after - before <= 4 << 20
        assert grown == {}


@pytest.mark.patient
def test_ending_twice_and_calls_after_the_end():
    def body(comm):
        part = comm.split(0)
        tensor = comm.empty(10).fill_(comm.rank)
        work = comm.all_reduce(tensor, async_op=True)
        part.close()
        part.close()
        dp.finalize()
        dp.finalize()
        comm.close()
        assert comm.closed and part.closed
        work.wait()  # finalize has waited for it
        assert work.is_completed() and tensor[0] == 1
        for closed in (comm, part):
            for call in (
                lambda c=closed: c.all_reduce(tensor),
                lambda c=closed: c.all_reduce(tensor, async_op=True),
                lambda c=closed: c.barrier(),
                lambda c=closed: c.empty(10),
                lambda c=closed: c.split(0),
                lambda c=closed: c.send(tensor, 1 - c.rank),
            ):
                with pytest.raises(dp.Error, match=r"was finalized; call init\(\)"):
                    call()
            assert "closed" in repr(closed)
        with pytest.raises(dp.Error, match="there is no communicator yet"):
            dp.current()

    results(body)
    results(body, run=run_threads)


@pytest.mark.patient
def test_the_parts_outlive_the_whole():
    """A group that was split off works on when its parent is closed."""

    def body(comm):
        part = comm.split(0)
        dp.finalize()
        tensor = part.empty(1000).fill_(1)
        part.all_reduce(tensor)
        part.close()
        return tensor.unique().tolist()

    assert results(body, 3) == [[3.0]] * 3


@pytest.mark.patient
def test_a_second_init_needs_a_finalize():
    def body(comm):
        with pytest.raises(dp.Error, match="call finalize"):
            dp.init(rank=comm.rank, world_size=2, init_method="second")
        comm.barrier()

    results(body)


@pytest.mark.patient
def test_a_tensor_outlives_its_communicator():
    def body(comm):
        tensor = comm.empty(100_000).fill_(comm.rank + 1)
        view = tensor[500:600]
        comm.all_reduce(tensor)
        dp.finalize()
        del comm, tensor
        gc.collect()
        view += 1
        mapped = "dpcore-arena" in open("/proc/self/maps").read()  # noqa: SIM115
        values = view.unique().tolist()
        del view
        gc.collect()
        still_mapped = "dpcore-arena" in open("/proc/self/maps").read()  # noqa: SIM115
        return values, mapped, still_mapped

    # run_processes itself holds the communicator, so its arena is still there at the end.
    assert [result[:2] for result in results(body)] == [([4.0], True)] * 2

    def alone(comm):
        rank = comm.rank
        dp.finalize()
        new = dp.init(rank=rank, world_size=2, init_method="outlives")
        tensor = new.empty(100_000).fill_(1)
        new.all_reduce(tensor)
        dp.finalize()
        del new
        gc.collect()
        kept = open("/proc/self/maps").read().count("dpcore-arena")  # noqa: SIM115
        del tensor
        gc.collect()
        left = open("/proc/self/maps").read().count("dpcore-arena")  # noqa: SIM115
        return kept - left

    assert results(alone) == [1, 1]


@pytest.mark.patient
def test_work_and_tensors_are_dropped_in_flight():
    """The communicator keeps what an operation uses, whatever the program lets go of."""

    def body(comm):
        late = comm.rank == 1
        if late:
            time.sleep(0.2)
        for size in (10, 100_000, 1 << 20):
            for new in (torch.empty, comm.empty):
                comm.all_reduce(new(size).fill_(1), async_op=True)
        gc.collect()
        garbage = [torch.full((1 << 20,), 9.0) for _ in range(4)]
        check = torch.ones(1000)
        comm.all_reduce(check, async_op=True).wait()
        return check.unique().tolist(), len(garbage)

    assert results(body) == [([2.0], 4)] * 2


@both_transports
@three_tries
def test_close_waits_for_what_is_in_flight(transport):
    def body(comm):
        if comm.rank == 1:
            time.sleep(0.3)
        tensor = comm.empty(1 << 20).fill_(1)
        entered = time.monotonic()
        comm.all_reduce(tensor, async_op=True)
        closes = time.monotonic()
        comm.close()
        closed = time.monotonic()
        return tensor.unique().tolist(), entered, closes, closed

    first, second = results(body, options={"transport": transport})
    assert first[0] == second[0] == [2.0]
    entered, (closes, closed) = second[1], first[2:]
    in_time(closes < entered, "there was nothing to wait for")
    assert closed > entered
    in_time(closed - entered < 2)


@pytest.mark.patient
def test_after_a_failure_blocks_are_not_handed_out_again():
    """A stopped rank that wakes up may still write where it was told to."""

    def body(comm):
        tensor = comm.empty(1 << 20).fill_(1)
        with pytest.raises(dp.PeerLost):
            for _ in range(10):
                comm.all_reduce(tensor)
        used = comm.stats()["arena"]["used"]
        del tensor
        gc.collect()
        return comm.stats()["arena"]["used"] - used

    outcomes = run_processes(body, 2, environment={"DPCORE_FAULT": "kill:rank1:op3:middle"})
    assert outcomes[0].error is None, outcomes[0].traceback
    assert outcomes[0].result == 0
    assert os.WTERMSIG(-outcomes[1].exit_code) == 9
