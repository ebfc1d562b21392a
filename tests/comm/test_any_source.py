"""Messages that are received from whichever rank they come."""

import re

import pytest
import torch

import dpcore
from tests.comm.modes import HOW, MODES

every_mode = pytest.mark.parametrize("mode", MODES)
SIZES = (10, 300_000)


def of_rank(rank, count):
    return torch.full((count,), float(rank + 1))


@every_mode
@pytest.mark.parametrize("count", SIZES)
def test_every_message_is_received_once_and_names_its_sender(mode, count):
    def body(comm):
        if comm.rank != 1:
            comm.send(of_rank(comm.rank, count), 1, tag=5)
            return None
        sources = []
        for _ in range(comm.world_size - 1):
            target = torch.empty(count)
            work = comm.recv(target, None, tag=5, async_op=True)
            work.wait()
            assert torch.equal(target, of_rank(work.source, count))
            sources.append(work.source)
        return sorted(sources)

    assert dpcore.spawn(body, 3, **HOW[mode])[1] == [0, 2]


@every_mode
def test_receives_of_one_rank_and_of_any_keep_their_order(mode):
    """A receive that stands in the queues of all ranks must leave them when it has found one.

    Rank 2 keeps its second message until the first three receives are over: they are free to take
    both of its messages, and the last one would wait for a third.
    """

    def body(comm):
        if comm.rank != 0:
            for step in range(2):
                if comm.rank == 2 and step == 1:
                    comm.recv(torch.empty(1), 0, tag=2)
                comm.send(of_rank(10 * comm.rank + step, 100), 0, tag=1)
            return None
        targets = [torch.empty(100) for _ in range(4)]
        sources = (1, None, None, 2)
        works = [
            comm.recv(target, source, tag=1, async_op=True)
            for target, source in zip(targets, sources, strict=True)
        ]
        for work in works[:3]:
            work.wait()
        comm.send(torch.ones(1), 2, tag=2)
        works[3].wait()
        assert works[0].source == 1 and works[3].source == 2
        received = [(work.source, int(t[0]) - 1) for work, t in zip(works, targets, strict=True)]
        for rank in (1, 2):
            values = [value for source, value in received if source == rank]
            assert values == [10 * rank, 10 * rank + 1], received
        return True

    assert dpcore.spawn(body, 3, **HOW[mode])[0]


@every_mode
def test_other_tags_wait_for_their_own_receive(mode):
    def body(comm):
        if comm.rank == 0:
            comm.send(of_rank(7, 40_000), 1, tag=7)
            comm.send(of_rank(8, 40_000), 1, tag=8)
        else:
            for tag in (8, 7):
                target = torch.empty(40_000)
                comm.recv(target, None, tag=tag)
                assert torch.equal(target, of_rank(tag, 40_000))

    dpcore.spawn(body, 2, **HOW[mode])


def test_when_all_others_have_left_it_says_so():
    def body(comm):
        if comm.rank == 0:
            with pytest.raises(dpcore.PeerLost, match="recv of 16 bytes from any rank"):
                comm.recv(torch.ones(4), None)

    dpcore.spawn(body, 3, mode="processes")


def test_a_message_of_no_elements_has_to_name_its_rank():
    def body(comm):
        with pytest.raises(dpcore.Unsupported, match=re.escape("name the rank")):
            comm.recv(torch.ones(0), None)

    dpcore.spawn(body, 2, mode="threads")
