"""A rank that only gives does not wait for those who take, who wait for the giver alone
(docs/decisions/0007 and 0036)."""

import threading
import time
from contextlib import suppress

import pytest
import torch

import dpcore
from tests.comm.modes import HOW, MODES

STAGES = 4  # how far a giver gets ahead
SLOTS = 64  # the same where the slot itself has room for the data


def spawn(body, world, *arguments):
    return dpcore.spawn(body, world, *arguments, mode="threads")


def test_a_root_changes_its_data_before_anybody_has_taken_it():
    given = threading.Event()

    def body(comm):
        tensor = torch.zeros(100)
        taken = []
        if comm.rank == 0:
            for step in range(STAGES):
                comm.broadcast(tensor.fill_(step + 1))
            given.set()
        else:
            assert given.wait(20), "the root waits for those who take"
            for _ in range(STAGES):
                comm.broadcast(tensor)
                taken.append(tensor.unique().tolist())
        comm.barrier()
        return taken

    assert spawn(body, 3)[1:] == [[[1.0], [2.0], [3.0], [4.0]]] * 2


@pytest.mark.parametrize("how", MODES)
def test_takers_may_fill_all_slots_before_the_giver_looks_again(how, tmp_path):
    """Until then their slots must hold what the giver compares with."""

    def body(comm, folder):
        given, sums = torch.full((8,), 1.0 + comm.rank), torch.ones(SLOTS, 10_000)
        comm.broadcast(given)
        if comm.rank == 0:
            while len(list(folder.iterdir())) < comm.world_size - 1:
                time.sleep(0.001)
            time.sleep(0.05)  # for the progress threads of the others
        works = [comm.all_reduce(row, async_op=True) for row in sums]
        (folder / str(comm.rank)).touch()
        for work in works:
            work.wait()
        comm.barrier()
        return given.unique().tolist(), sums.unique().tolist()

    assert dpcore.spawn(body, 3, tmp_path, **HOW[how]) == [([1.0], [3.0])] * 3


@pytest.mark.parametrize(("elements", "ahead"), [(3, SLOTS), (100, STAGES)])
@pytest.mark.parametrize("collective", ["broadcast", "scatter", "reduce", "gather"])
def test_a_giver_is_held_back_when_nobody_takes(collective, elements, ahead):
    given = [threading.Event() for _ in range(ahead + 1)]

    def call(comm, step):
        part = torch.full((elements,), float(step))
        whole = torch.full((2 * elements,), float(step))
        if collective == "broadcast":
            comm.broadcast(part, root=0)
        elif collective == "scatter":
            comm.scatter(part, whole if comm.rank == 0 else None, root=0)
        elif collective == "reduce":
            comm.reduce(part, root=1)
        else:
            comm.gather(whole if comm.rank == 1 else None, part, root=1)
        return part.unique().tolist(), whole.unique().tolist()

    def body(comm):
        if comm.rank == 0:
            for step, event in enumerate(given):
                call(comm, step)
                event.set()
            return None
        assert given[ahead - 1].wait(20)
        assert not given[ahead].wait(0.2), "the place of the first was used before it was read"
        return [call(comm, step) for step in range(ahead + 1)]

    results = spawn(body, 2)[1]
    for step, (part, whole) in enumerate(results):
        assert part == [step * 2.0 if collective == "reduce" else float(step)]
        assert whole == [float(step)]


@pytest.mark.parametrize("collective", ["broadcast", "reduce"])
def test_a_giver_goes_on_though_its_taker_has_freed_fewer_slots_than_it_rings_for(collective):
    """It sleeps by then, and its taker takes no more until it has gone on."""
    freed = 5
    gone_on = [threading.Event() for _ in range(4)]

    def body(comm):
        call = getattr(comm, collective)
        if (comm.rank == 0) == (collective == "broadcast"):  # a giver
            for _ in range(SLOTS + freed):
                call(torch.ones(2))
            gone_on[comm.rank].set()
        else:
            time.sleep(0.05)
            for _ in range(freed):
                call(torch.ones(2))
            givers = [0] if collective == "broadcast" else [1, 2, 3]
            assert all(gone_on[giver].wait(20) for giver in givers)
            for _ in range(SLOTS):
                call(torch.ones(2))
        comm.barrier()

    spawn(body, 4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("then", ["barrier", "all_reduce", "broadcast"])
def test_two_roots_find_out_when_they_wait_for_everybody(then, mode):
    def body(comm):
        comm.broadcast(torch.ones(4), root=comm.rank)
        if then == "broadcast":
            for _ in range(4):
                comm.broadcast(torch.ones(4), root=0)
        else:
            getattr(comm, then)(*([torch.ones(4)] if then == "all_reduce" else []))
        comm.barrier()

    with pytest.raises(dpcore.Mismatch, match=r"operation 0: (?=.*root 0)(?=.*root 1)"):
        dpcore.spawn(body, 2, **HOW[mode])


@pytest.mark.parametrize("elements", [4, 100])
@pytest.mark.parametrize("mode", MODES)
def test_two_roots_that_never_wait_find_out_as_many_operations_later_as_there_are_slots(
    mode, elements
):
    def body(comm):
        for _ in range(SLOTS + 1):
            comm.broadcast(torch.ones(elements), root=comm.rank)

    with pytest.raises(dpcore.Mismatch, match=r"operation 0: (?=.*root 0)(?=.*root 1)"):
        dpcore.spawn(body, 2, **HOW[mode])


def give(comm, collective, root):
    part, whole = torch.ones(4), torch.ones(4 * comm.world_size)
    is_root = comm.rank == root
    if collective == "gather":
        comm.gather(whole if is_root else None, part, root)
    elif collective == "scatter":
        comm.scatter(part, whole if is_root else None, root)
    else:
        getattr(comm, collective)(part, root)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("collective", ["broadcast", "scatter", "reduce", "gather"])
def test_two_givers_in_the_last_call_find_out_when_they_close(collective, mode):
    """Each of two ranks only gives, so neither has waited for the other."""

    def body(comm):
        comm.barrier()
        from_root = collective in ("broadcast", "scatter")
        give(comm, collective, comm.rank if from_root else 1 - comm.rank)

    with pytest.raises(
        dpcore.Mismatch, match=rf"operation 1: (?=.*{collective}.* root 0)(?=.* root 1).*done with"
    ):
        dpcore.spawn(body, 2, **HOW[mode])


@pytest.mark.parametrize("mode", MODES)
def test_who_took_in_the_last_call_compares_with_the_others_when_it_closes(mode):
    """Ranks 0 and 1 agree with each other, ranks 2 and 3 too."""

    def body(comm):
        comm.broadcast(torch.ones(4), root=[0, 0, 3, 3][comm.rank])

    with pytest.raises(dpcore.Mismatch, match=r"operation 0: (?=.*root 0)(?=.*root 3)"):
        dpcore.spawn(body, 4, **HOW[mode])


def test_a_rank_that_left_without_the_last_call_is_named():
    left = threading.Event()

    def body(comm):
        if comm.rank == 1:
            comm.close()
            left.set()
            return
        comm.broadcast(torch.ones(4))
        assert left.wait(20)
        said = r"rank 1 finalized and left without operation 0 \(broadcast .* which rank 0 called"
        with pytest.raises(dpcore.Mismatch, match=said):
            comm.close()

    spawn(body, 2)


@pytest.mark.parametrize("mode", MODES)
def test_a_giver_may_leave_before_anybody_has_taken(mode, tmp_path):
    def body(comm, folder):
        tensor = torch.full((4,), 1.0 + comm.rank)
        if comm.rank == 0:
            comm.broadcast(tensor)
            comm.close()
            (folder / "left").touch()
            return None
        until = time.monotonic() + 20
        while not (folder / "left").exists():
            assert time.monotonic() < until, "the giver waits for those who take"
            time.sleep(0.001)
        comm.broadcast(tensor)
        comm.close()
        return tensor.unique().tolist()

    assert dpcore.spawn(body, 3, tmp_path, **HOW[mode]) == [None, [1.0], [1.0]]


def test_a_giver_compares_nothing_that_its_peer_has_not_entered():
    """The broadcast is held back on rank 1, whose stage is taken by a long reduction, while urgent
    operations with much higher numbers come past it."""

    def body(comm):
        long, given = comm.empty(64 << 20), torch.full((100,), 7.0)
        tiny = torch.ones(SLOTS + 14)
        for _ in range(3):
            long.fill_(1.0)
            comm.barrier()
            works = [comm.reduce(long, root=1, async_op=True)]
            for number in range(1, SLOTS + 14):
                if number == STAGES:  # the stage of the reduction
                    works.append(comm.broadcast(given, root=0, priority=1, async_op=True))
                else:
                    one = tiny[number : number + 1]
                    works.append(comm.all_reduce(one, priority=1, async_op=True))
            for work in works:
                work.wait()
        return given.unique().tolist()

    assert spawn(body, 2) == [[7.0]] * 2


def test_who_takes_compares_with_the_root_before_it_writes():
    tensor = torch.full((4,), 7.0)

    def body(comm):
        if comm.rank == 2:
            with pytest.raises(dpcore.Mismatch, match=r"root 0.* root 1.*No data was touched"):
                comm.broadcast(tensor, root=0)
        else:
            with suppress(dpcore.Mismatch):  # of rank 2, if that comes first
                comm.broadcast(torch.ones(4), root=1)
                comm.close()

    spawn(body, 3)
    assert tensor.tolist() == [7.0] * 4


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("elements", [4, 100])
@pytest.mark.parametrize("collective", ["broadcast", "scatter"])
def test_who_takes_does_not_wait_for_others_who_take(collective, elements, mode, tmp_path):
    def body(comm, folder):
        part, whole = torch.zeros(elements), torch.ones(3 * elements)
        if comm.rank == 2:
            until = time.monotonic() + 20
            while not (folder / "taken").exists():
                assert time.monotonic() < until, "rank 1 waits for rank 2"
                time.sleep(0.001)
        if collective == "broadcast":
            comm.broadcast(part.fill_(comm.rank == 0))
        else:
            comm.scatter(part, whole if comm.rank == 0 else None)
        if comm.rank == 1:
            (folder / "taken").touch()
        comm.barrier()
        return part.unique().tolist()

    assert dpcore.spawn(body, 3, tmp_path, **HOW[mode]) == [[1.0]] * 3


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("later", [1, SLOTS])
def test_who_has_taken_compares_with_the_others_later(later, mode):
    """Rank 2 has another root, which is one too; rank 1 has taken what it wanted by then."""

    def body(comm):
        comm.broadcast(torch.ones(4), root=[0, 0, 3, 3][comm.rank])
        if later == 1:
            comm.barrier()
        for _ in range(later):
            comm.broadcast(torch.ones(4), root=0)

    with pytest.raises(
        dpcore.Mismatch, match=r"operation 0: (?=.*root 0)(?=.*root 3).*done with it"
    ):
        dpcore.spawn(body, 4, **HOW[mode])


def test_a_root_that_does_not_come_is_named_and_nobody_else():
    def body(comm):
        if comm.rank == 2:
            comm.broadcast(torch.ones(4), root=0, timeout=0.3)
        time.sleep(0.6)

    with pytest.raises(dpcore.Timeout, match="rank 0 has not entered it") as caught:
        spawn(body, 3)
    assert "rank 1" not in str(caught.value)
