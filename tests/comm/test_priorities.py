"""Urgent operations and messages come past those that were called before them."""

import socket
import sys
from pathlib import Path

import cloudpickle
import pytest
import torch

import dpcore
from dpcore import _C
from dpcore.base.link import Speed
from dpcore.tools.simulate.network import Network, NetworkOperation
from tests.comm.modes import HOW

cloudpickle.register_pickle_by_value(sys.modules[__name__])

PIECE = 256 << 10


# ---- the emulated NIC, with a clock of its own --------------------------------------------------


def nic(latency=0.0, ranks=2):
    """A byte takes a nanosecond."""
    return _C.Link(0, [(1e9, latency, 0.0, 0.0)] * ranks, 0.0, 0)


def test_an_urgent_message_waits_for_one_piece_and_not_for_what_was_ready_before():
    link = nic()
    bulk = [link.send(1, PIECE, 0, now=0) for _ in range(5)]
    assert link.arrival(bulk[0], now=10) == PIECE
    urgent = link.send(1, 1000, 7, now=20)
    assert link.arrival(urgent, now=30) is None  # the NIC is busy: it has not chosen yet
    assert link.arrival(urgent, now=PIECE) == PIECE + 1000
    assert [link.arrival(ticket, now=10 * PIECE) for ticket in bulk[1:]] == [
        n * PIECE + 1000 for n in (2, 3, 4, 5)
    ]


def test_who_looks_too_late_finds_what_the_card_did_in_time():
    looked_at_once, looked_late = nic(), nic()
    for link, looks in ((looked_at_once, range(0, 4 * PIECE, PIECE // 4)), (looked_late, ())):
        bulk = [link.send(1, PIECE, 0, now=0) for _ in range(3)]
        urgent = link.send(1, PIECE, 1, now=PIECE + 1)
        early = {link.arrival(urgent, now=now) for now in looks} - {None}
        assert early <= {3 * PIECE}
        if not early:
            assert link.arrival(urgent, now=9 * PIECE) == 3 * PIECE  # behind the second bulk one
        assert [link.arrival(ticket, now=9 * PIECE) for ticket in bulk] == [
            PIECE, 2 * PIECE, 4 * PIECE
        ]  # fmt: skip


def test_a_large_message_is_cut_so_that_an_urgent_one_comes_between():
    link = nic()
    bulk = link.send(1, 10 * PIECE, 0, now=0)
    urgent = link.send(1, 10, 1, now=2 * PIECE + 5)
    assert link.arrival(urgent, now=3 * PIECE) == 3 * PIECE + 10
    assert link.arrival(bulk, now=20 * PIECE) == 10 * PIECE + 10


def test_equal_priorities_keep_the_order_in_which_they_were_ready():
    link = nic(ranks=3)
    tickets = [link.send(1 + n % 2, 100, 3, now=n) for n in range(4)]
    assert [link.arrival(ticket, now=1000) for ticket in tickets] == [100, 200, 300, 400]


def test_an_idle_card_waits_for_nobody_and_the_latency_takes_no_time_of_the_card():
    link = nic(latency=1e-6)
    first, second = link.send(1, 100, 0, now=0), link.send(1, 100, 0, now=0)
    assert [link.arrival(ticket, now=200) for ticket in (first, second)] == [1100, 1200]
    third = link.send(1, 100, 0, now=5000)
    assert link.arrival(third, now=5000) == 6100


def test_a_message_that_was_given_up_takes_no_time():
    link = nic()
    first, second, third = (link.send(1, 1000, 0, now=0) for _ in range(3))
    assert link.arrival(first, now=0) == 1000
    link.withdraw(second)
    assert link.arrival(third, now=5000) == 2000
    assert link.arrival(second, now=9000) is None


def test_jitter_and_loss_belong_to_the_message_and_not_to_its_turn():
    def arrivals(priorities):
        link = _C.Link(0, [(1e9, 1e-3, 1e-4, 0.5)] * 2, 0.0, 5)
        tickets = [link.send(1, 1, p, now=n * 10**9) for n, p in enumerate(priorities)]
        return [link.arrival(ticket, now=10**11) for ticket in tickets]

    assert arrivals([0] * 8) == arrivals(range(8))
    assert len({moment % 10**9 for moment in arrivals([0] * 8)}) == 8


# ---- dpcore simulate -----------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize(("count", "nbytes"), [(6, 3 << 20), (14, 1 << 20), (40, 1 << 20)])
@pytest.mark.parametrize("urgent_bytes", [64 << 10, 1 << 20])
def test_simulated_urgent_operations_wait_for_two_segments_at_most(
    world, count, nbytes, urgent_bytes
):
    link = Speed(125e6, 50e-6)

    def run(bulk, priority):
        urgent = NetworkOperation(urgent_bytes, [0.0033] * world, priority)
        operations = [NetworkOperation(nbytes, [0.0] * world) for _ in range(bulk)]
        Network(world, link).run([*operations, urgent])
        return max(urgent.finished), max(max(o.finished) for o in [*operations, urgent])

    alone, _ = run(0, 0)
    urgent, all_of_it = run(count, 1000)
    behind, without = run(count, 0)
    assert urgent <= alone + 2 * PIECE / link.bytes_per_second
    assert behind > 10 * (urgent - 0.0033) or urgent_bytes > PIECE
    assert all_of_it == pytest.approx(without, rel=0.001)


# ---- operations ----------------------------------------------------------------------------------


def completed_before_the_urgent_one(comm, count, nbytes, urgent_bytes):
    """How many of the operations that were called before."""
    order = []
    bulk = [torch.ones(nbytes // 4) for _ in range(count)]
    urgent = torch.ones(urgent_bytes // 4)
    comm.barrier()
    works = [comm.all_reduce(tensor, async_op=True) for tensor in bulk]
    works.append(comm.all_reduce(urgent, async_op=True, priority=1000))
    for number, work in enumerate(works):
        work.get_future().add_done_callback(lambda _, n=number: order.append(n))
    for work in works:
        work.wait()
    assert urgent.unique().tolist() == [comm.world_size]
    return order.index(count)


@pytest.mark.quiet
@pytest.mark.parametrize(
    ("how", "nbytes"),
    [({"mode": "threads", "link": "40mbit,100us"}, 64 << 10), (HOW["tcp"], 1 << 20)],
    ids=["emulated", "tcp"],
)
@pytest.mark.parametrize("urgent_bytes", [4096, 256 << 10])
def test_an_urgent_operation_comes_past_forty_others(how, nbytes, urgent_bytes):
    """With sixteen slots, or behind whoever has the same stage, it came after 25 of them and more.
    A rank that pauses while it calls them lets some through: the best of a few counts."""

    def body(comm):
        return min(
            completed_before_the_urgent_one(comm, 40, nbytes, urgent_bytes) for _ in range(3)
        )

    assert max(dpcore.spawn(body, 2, **how)) <= 12


def test_connections_keep_little_data_that_an_urgent_frame_would_wait_for():
    def body(comm):
        limits = []
        for entry in Path("/proc/self/fd").iterdir():
            try:
                found = socket.socket(fileno=int(entry.name))
            except (OSError, ValueError):
                continue
            if found.family in (socket.AF_INET, socket.AF_INET6):
                limits.append(found.getsockopt(socket.IPPROTO_TCP, 25))  # TCP_NOTSENT_LOWAT
            found.detach()
        return [limit for limit in limits if limit > 0]

    for limits in dpcore.spawn(body, 3, **HOW["tcp"]):
        assert len(limits) == 2  # of data, one for each peer
        assert 0 < sum(limits) <= 2 * PIECE


# ---- who is urgent -------------------------------------------------------------------------------


def test_buffers_before_a_forward_and_batch_normalisation_are_urgent(monkeypatch):
    asked = []
    for name in ("all_reduce", "all_gather", "broadcast"):
        plain = getattr(dpcore.Communicator, name)

        def noting(self, *args, _plain=plain, _name=name, **options):
            asked.append((_name, options.get("priority", 0)))
            return _plain(self, *args, **options)

        monkeypatch.setattr(dpcore.Communicator, name, noting)

    def body(comm):
        net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.SyncBatchNorm(4))
        wrapped = dpcore.DataParallel(net, comm=comm)
        comm.barrier()
        asked.clear()
        comm.barrier()
        wrapped(torch.randn(8, 4)).sum().backward()
        comm.barrier()

    dpcore.spawn(body, 2, mode="threads")
    of_the_step = set(asked)
    assert {name for name, _ in of_the_step} == {"all_reduce", "all_gather", "broadcast"}
    assert min(priority for _, priority in of_the_step) > 1_000_000
