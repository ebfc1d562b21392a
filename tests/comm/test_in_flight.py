"""Messages, asynchronous work, several operations and several communicators at once."""

import gc
import itertools
import os
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import dpcore
from tests.comm.modes import HOW, MODES
from tests.faults.tries import in_time, three_tries

every_mode = pytest.mark.parametrize("mode", MODES)
SIZES = (1, 3, 1000, 70_001, 0, 5, 262_144, 17, 4096, 33)


def numbers(seed, count):
    return torch.randint(-99, 99, (count,), generator=torch.Generator().manual_seed(seed)).double()


def summed(seed, count, ranks):
    return sum((numbers(seed + r, count) for r in ranks), torch.zeros(count, dtype=torch.float64))


# ---- messages --------------------------------------------------------------------------------


@every_mode
def test_messages_find_their_receiver_by_tag_in_any_order(mode):
    def body(comm):
        if comm.rank == 0:
            for tag, count in enumerate(SIZES):
                comm.send(numbers(tag, count), 1, tag=tag, async_op=count > 1000)
        else:
            for tag, count in reversed(list(enumerate(SIZES))):
                tensor = torch.empty(count, dtype=torch.float64)
                comm.recv(tensor, 0, tag=tag)
                assert torch.equal(tensor, numbers(tag, count))
        comm.barrier()

    dpcore.spawn(body, 2, **HOW[mode])


@every_mode
@pytest.mark.parametrize("count", (10, 300_000), ids=("small", "large"))
def test_messages_with_the_same_tag_arrive_in_the_order_of_the_calls(mode, count):
    def body(comm):
        peer, n = 1 - comm.rank, 12
        targets = [torch.empty(count, dtype=torch.float64) for _ in range(n)]
        works = [comm.recv(target, peer, tag=4, async_op=True) for target in targets]
        works += [comm.send(numbers(i, count), peer, tag=4, async_op=True) for i in range(n)]
        for work in works:
            work.wait()
        return [i for i, target in enumerate(targets) if not torch.equal(target, numbers(i, count))]

    assert dpcore.spawn(body, 2, **HOW[mode]) == [[], []]


@every_mode
def test_what_a_rank_sent_before_it_left_is_received(mode):
    def body(comm):
        if comm.rank == 0:
            for step in range(300):
                comm.send(torch.full((4,), float(step)), 1)
            return
        time.sleep(0.5)  # rank 0 has left, where its messages fit between them
        for step in range(300):  # so many that the engine looks who is gone in between
            target = torch.empty(4)
            comm.recv(target, 0)
            assert target.tolist() == [step] * 4

    dpcore.spawn(body, 2, **HOW[mode])


@every_mode
def test_everybody_sends_to_everybody_at_once(mode):
    def body(comm):
        peers = [r for r in range(comm.world_size) if r != comm.rank]
        sent, received = [], []
        for peer, (tag, count) in itertools.product(peers, enumerate(SIZES)):
            data = numbers(1000 * comm.rank + tag, count)
            sent.append(comm.send(data, peer, tag=tag, async_op=True))
        for peer, (tag, count) in itertools.product(peers, reversed(list(enumerate(SIZES)))):
            target = torch.empty(count, dtype=torch.float64)
            received.append((comm.recv(target, peer, tag=tag, async_op=True), target, peer, tag))
        for work, target, peer, tag in received:
            work.wait()
            assert torch.equal(target, numbers(1000 * peer + tag, target.numel()))
        for work in sent:
            work.wait()

    dpcore.spawn(body, 3, **HOW[mode])


def test_a_message_of_another_size_is_a_mismatch():
    def body(comm):
        if comm.rank == 0:
            comm.send(torch.ones(3), 1)
        else:
            comm.recv(torch.ones(4), 0)
        comm.barrier()

    with pytest.raises(dpcore.Mismatch, match="12 bytes of float32, but 16"):
        dpcore.spawn(body, 2, mode="threads")


@every_mode
def test_a_large_message_that_is_not_asked_for_yet_holds_nothing_up(mode):
    """All ranks make their calls in the same order; over TCP the all-reduce comes behind it."""

    def body(comm):
        large, tensor = torch.full((260 << 20,), comm.rank, dtype=torch.uint8), torch.ones(1 << 18)
        work = comm.send(large, 1, async_op=True) if comm.rank == 0 else None
        comm.all_reduce(tensor)
        if work is None:
            comm.recv(large, 0)
        else:
            work.wait()
        return tensor.unique().tolist(), large[::4096].unique().tolist()

    assert dpcore.spawn(body, 2, **HOW[mode]) == [([2.0], [0])] * 2


@pytest.mark.parametrize("mode", ["tcp"])
@three_tries
def test_a_long_message_lets_others_have_their_turn(mode):
    """It goes on for a tenth of a second, and is not moved as a whole under the engine's lock."""

    def body(comm):
        message, tensor = torch.zeros(512 << 20, dtype=torch.uint8), torch.ones(1 << 18)
        way = comm.send if comm.rank == 0 else comm.recv
        ended = []
        for _ in range(4):
            comm.barrier()
            work = way(message, 1 - comm.rank, async_op=True)
            comm.all_reduce(tensor, priority=5)
            ended.append(work.is_completed())
            work.wait()
        return ended

    in_time(dpcore.spawn(body, 2, **HOW[mode]) == [[False] * 4] * 2, "behind the message")


@every_mode
def test_operations_that_only_read_share_memory(mode):
    def body(comm):
        tensor = torch.full((100_000,), float(comm.rank + 1))
        other = torch.empty(100_000)
        first = comm.broadcast(tensor if comm.rank == 0 else other, 0, async_op=True)
        if comm.rank == 0:
            second = comm.send(tensor, 1, async_op=True)
            second.wait()
        else:
            comm.recv(tensor, 0)
        first.wait()
        return tensor[0].item(), other[0].item() if comm.rank else 1.0

    assert dpcore.spawn(body, 2, **HOW[mode]) == [(1.0, 1.0)] * 2


# ---- asynchronous work -----------------------------------------------------------------------


@every_mode
def test_many_all_reduces_in_flight_waited_for_in_reverse(mode):
    def body(comm):
        ranks = range(comm.world_size)
        works = []
        for i in range(20):
            count = SIZES[i % len(SIZES)]
            tensor = numbers(10 * i + comm.rank, count)
            works.append((comm.all_reduce(tensor, async_op=True), tensor, i))
        for work, tensor, i in reversed(works):
            work.wait()
            assert work.is_completed()
            assert torch.equal(tensor, summed(10 * i, tensor.numel(), ranks))

    dpcore.spawn(body, 3, **HOW[mode])


@every_mode
def test_different_kinds_and_priorities_in_flight(mode):
    """Also with lists of moves, whose messages stand in each other's way, and with priorities
    that differ between the ranks."""

    def body(comm):
        rank, world = comm.rank, comm.world_size
        algorithms = (None, "ring", "two_shot", "tree", "halving_doubling", "two_shot/moves")
        works = []
        for i, algorithm in enumerate(algorithms * 3):
            tensor = numbers(10 * i + rank, SIZES[i % len(SIZES)])
            priority = (i * 7 + rank * 3) % 5 - 2
            options = {"algorithm": algorithm, "priority": priority, "async_op": True}
            works.append((comm.all_reduce(tensor, **options), tensor, i))
            comm.broadcast(torch.ones(50_000), i % world, priority=priority, async_op=True)
        for work, tensor, i in works:
            work.wait()
            assert torch.equal(tensor, summed(10 * i, tensor.numel(), range(world)))

    dpcore.spawn(body, 3, **HOW[mode])


@every_mode
def test_operations_that_overtake_leave_the_stage_of_a_slow_one_alone(mode):
    """Ordinary memory goes through one of a few stages in turn. The operations between two users
    of the same stage may be of a kind that needs none, and be over long before the first user."""

    def body(comm):
        world, mapped = comm.world_size, comm.empty(3, 30_000).fill_(1.0)
        for round_ in range(10):
            works, sent = [], []
            for i in range(24):
                if i % 8 == 0:
                    tensor = numbers(10 * i + comm.rank, (400_000, 1000, 9000)[(i // 8) % 3])
                    work = comm.all_reduce(tensor, priority=i, async_op=True)
                    works.append((work, tensor, i))
                elif i % 8 == 4:
                    one = mapped[i // 8]
                    sent.append(comm.broadcast(one, i % world, priority=i, async_op=True))
                else:
                    comm.barrier(async_op=True)
            for work, tensor, i in reversed(works):
                work.wait()
                expected = summed(10 * i, tensor.numel(), range(world))
                assert torch.equal(tensor, expected), (round_, i)
            for work in sent:
                work.wait()

    dpcore.spawn(body, 3, **HOW[mode])


def test_an_urgent_operation_overtakes_a_large_one():
    def body(comm):
        large, small = comm.empty(8 << 20), torch.ones(8)
        for _ in range(20):
            comm.barrier()
            slow = comm.all_reduce(large, async_op=True)
            comm.all_reduce(small, priority=1, async_op=True).wait()
            overtaken = not slow.is_completed()
            slow.wait()
            everywhere = torch.tensor([overtaken])
            comm.all_reduce(everywhere, "min")
            if everywhere:
                return True
        return False

    assert dpcore.spawn(body, 2) == [True, True]


def test_the_life_of_a_work():
    def body(comm):
        tensor = torch.ones(5)
        if comm.rank == 1:
            comm.recv(torch.empty(1), 0)  # until rank 0 has looked
        work = comm.all_reduce(tensor, async_op=True)
        if comm.rank == 0:
            assert not work.is_completed()
            assert work.exception() is None
            assert "in flight" in repr(work)
            comm.send(torch.ones(1), 1)
        future = work.get_future()
        while not work.is_completed():  # goes on by itself
            time.sleep(0.001)
        assert future.wait()[0] is tensor
        for _ in range(2):  # a second wait is fine
            work.wait()
        assert work.exception() is None
        assert "complete" in repr(work)
        assert work.get_future().wait()[0] is tensor
        return tensor.tolist()

    assert dpcore.spawn(body, 2, mode="threads") == [[2.0] * 5] * 2


def test_a_work_that_failed_has_an_exception_and_so_has_its_future():
    def body(comm):
        work = comm.all_reduce(torch.ones(3 + comm.rank), async_op=True)
        future = work.get_future()
        with pytest.raises(dpcore.Mismatch, match="3 x float32"):
            work.wait()
        assert isinstance(work.exception(), dpcore.Mismatch)
        with pytest.raises(dpcore.Mismatch, match="4 x float32"):
            future.wait()
        with pytest.raises(dpcore.Mismatch):  # the communicator is broken
            comm.barrier()
        comm.close()

    dpcore.spawn(body, 2, mode="threads")


def test_a_work_may_be_dropped_while_it_is_in_flight():
    def body(comm):
        if comm.rank == 0:
            tensor = torch.ones(100_000)
            kept = tensor.numpy()  # shares the memory
            alive = weakref.ref(tensor)
            comm.all_reduce(tensor, async_op=True)
            del tensor
            gc.collect()
            assert alive() is not None  # held by the operation
            comm.send(torch.ones(1), 1)
        else:
            comm.recv(torch.ones(1), 0)
            kept = np.ones(100_000, np.float32)
            comm.all_reduce(kept)
        comm.barrier()
        comm.all_reduce(torch.ones(1), async_op=True).wait()  # lets go of what is complete
        if comm.rank == 0:
            gc.collect()
            assert alive() is None
        return bool((kept == 2).all())

    assert dpcore.spawn(body, 2, mode="threads") == [True, True]


# ---- groups ----------------------------------------------------------------------------------


@every_mode
def test_split_by_color_and_key(mode):
    def body(comm):
        rank, world = comm.rank, comm.world_size
        half = comm.split(rank % 2, key=-rank)  # backwards
        members = [r for r in reversed(range(world)) if r % 2 == rank % 2]
        assert (half.rank, half.world_size) == (members.index(rank), len(members))
        tensor = numbers(rank, 30_000)
        half.all_reduce(tensor)
        assert torch.equal(tensor, summed(0, 30_000, members))

        alone = half.split(half.rank)
        assert (alone.rank, alone.world_size) == (0, 1)
        one_left_out = comm.split(None if rank == 2 else 7)
        assert (one_left_out is None) == (rank == 2)
        if one_left_out is not None:
            ids = torch.empty(world - 1, dtype=torch.int64)
            one_left_out.all_gather(ids, torch.tensor([rank]))
            assert ids.tolist() == [r for r in range(world) if r != 2]
            one_left_out.close()
        same_order = comm.split(0)
        assert same_order.rank == rank

    dpcore.spawn(body, 5, **HOW[mode])


@every_mode
def test_groups_and_their_parent_work_at_the_same_time(mode):
    def body(comm):
        rank = comm.rank
        row, column = comm.split(rank // 2), comm.split(rank % 2)
        works = []
        for i in range(8):
            for group, ranks in (
                (comm, range(4)),
                (row, [rank // 2 * 2, rank // 2 * 2 + 1]),
                (column, [rank % 2, rank % 2 + 2]),
            ):
                tensor = numbers(10 * i + rank, SIZES[i])
                works.append((group.all_reduce(tensor, async_op=True), tensor, i, ranks))
        for work, tensor, i, ranks in reversed(works):
            work.wait()
            assert torch.equal(tensor, summed(10 * i, SIZES[i], ranks))

    dpcore.spawn(body, 4, **HOW[mode])


def test_a_closed_group_does_not_disturb_its_parent():
    def body(comm):
        for i in range(30):
            group = comm.split(comm.rank % 2)
            group.all_reduce(torch.ones(1000))
            group.close()
            with pytest.raises(dpcore.Error, match="finalized"):
                group.barrier()
            tensor = torch.full((10,), float(i))
            comm.all_reduce(tensor)
            assert tensor.tolist() == [4.0 * i] * 10
        assert comm.stats()["arena"]["bytes"] < 64 << 20

    dpcore.spawn(body, 4, mode="threads")


@every_mode
def test_communicators_one_after_the_other(mode):
    def body(comm, job):
        for i in range(4):
            rank, world = comm.rank, comm.world_size
            tensor = torch.ones(1000)
            comm.all_reduce(tensor)
            assert tensor[0] == world
            dpcore.finalize()
            with pytest.raises(dpcore.Error, match="finalized"):
                comm.all_reduce(tensor)
            transport = comm.transport
            comm = dpcore.init(
                rank=rank, world_size=world, init_method=f"{job}-{i}", transport=transport
            )

    dpcore.spawn(body, 3, f"after-each-other-{mode}-{time.time_ns()}", **HOW[mode])


def test_a_rank_may_meet_the_others_again_from_another_thread():
    def body(comm):
        rank, name = comm.rank, f"another-thread-{os.getppid()}"
        dpcore.finalize()

        def meet():
            again = dpcore.init(rank=rank, world_size=2, init_method=name, timeout=10)
            tensor = torch.ones(3)
            again.all_reduce(tensor)
            dpcore.finalize()
            return tensor.tolist()

        first = meet()
        if rank == 0:
            return [first, meet()]
        with ThreadPoolExecutor(1) as another:
            return [first, another.submit(meet).result()]

    assert dpcore.spawn(body, 2) == [[[2.0] * 3] * 2] * 2


def test_several_communicators_at_once():
    def sum_of(world, seed):
        def body(comm):
            for i in range(10):
                tensor = numbers(seed + i + comm.rank, 20_000)
                comm.all_reduce(tensor, algorithm=("ring", None)[i % 2])
                assert torch.equal(tensor, summed(seed + i, 20_000, range(world)))
            return seed

        results[seed] = dpcore.spawn(body, world, mode="threads")

    results = {}
    jobs = [(2, 100), (3, 200), (4, 300)]
    threads = [threading.Thread(target=sum_of, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {seed: [seed] * world for world, seed in jobs}
