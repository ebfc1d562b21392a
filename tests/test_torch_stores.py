"""How ranks meet through a store of torch: that of torchrun's agent, or of a process group."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

import dpcore
from dpcore.comm.launch import fresh_names, rendezvous
from dpcore.comm.launch.fresh_names import agree
from dpcore.comm.launch.identity import Identity
from dpcore.comm.launch.rendezvous import rendezvous_store, tcp_options


def agreed(store, world, ranks=None, timeout=10.0):
    """What ``agree`` returns, or its error, for each of these ranks."""
    with ThreadPoolExecutor(world) as pool:
        given = [
            pool.submit(agree, store, rank, world, timeout, f"host {rank}")
            for rank in (range(world) if ranks is None else ranks)
        ]
        return [one.exception() or one.result() for one in given]


def test_ranks_that_were_started_again_find_a_store_of_the_ranks_before(monkeypatch):
    """Of which some had come, a different number of times each."""
    monkeypatch.setattr(fresh_names, "_GRACE_SECONDS", 0.0)
    store = dist.HashStore()
    first = agreed(store, 3)
    assert first == [first[0]] * 3 and first[0][1] == ["host 0", "host 1", "host 2"]
    for ranks in ([0], [1], [1, 2], [0, 1], [2], [2]):
        for said in agreed(store, 3, ranks, timeout=0.05):
            assert isinstance(said, dpcore.RendezvousError)
    second = agreed(store, 3)
    assert second == [second[0]] * 3 and second[0][0] != first[0][0]


def test_ranks_that_miss_others_in_a_store_say_which():
    said = agreed(dist.HashStore(), 4, [0, 2], timeout=1.0)
    assert str(said[0]) == "rank 0: 2 of 4 ranks came; missing: 1, 3"
    assert str(said[1]) == f"rank 2: told by {said[0]}"
    (alone,) = agreed(dist.HashStore(), 2, [1], timeout=0.05)
    assert isinstance(alone, dpcore.RendezvousError)
    assert "rank 1: rank 0 did not come to the store" in str(alone)


def agent_with_store():
    """The store, and what the ranks of the agent are told."""
    agent = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    told = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "localhost"}
    return agent, told | {"MASTER_PORT": str(agent.port)}


@pytest.mark.parametrize("hosts", ("a", "ab"))
def test_the_loopback_address_of_rank_0_is_refused_on_another_host(monkeypatch, hosts):
    """Where its name leads to itself, as on Debian."""
    _agent, started = agent_with_store()
    of_thread = threading.local()
    monkeypatch.setattr(rendezvous, "this_host", lambda: of_thread.host)
    read = threading.Event()

    def meet(rank):
        of_thread.host = hosts[rank % len(hosts)]
        with tcp_options(Identity(rank, 2, "job"), "job/0", None, 10.0, started) as options:
            assert rank == 1 or read.wait(10)
            return options.root

    def join():
        try:
            return meet(1)
        finally:
            read.set()

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.submit(meet, 0), pool.submit(join)
    if len(hosts) == 1:
        assert second.result() == first.result()
        return
    with pytest.raises(
        dpcore.RendezvousError, match=r"another host than rank 0, .* 127\.0\.0\.1 of its own"
    ):
        second.result()


def test_the_store_of_an_agent_does_not_give_the_address_of_the_start_before():
    _agent, started = agent_with_store()

    def both():
        with ThreadPoolExecutor(2) as pool:
            asked = [
                pool.submit(rendezvous_store, started, Identity(rank, 2, "job"), None, 10.0)
                for rank in range(2)
            ]
            return [one.result() for one in asked]

    before, now = both(), both()
    with before[0].publish("job/0", "old:1"):
        assert before[1].read("job/0", time.monotonic() + 10) == "old:1"
    with pytest.raises(dpcore.RendezvousError, match="did not publish its address"):
        now[1].read("job/0", time.monotonic())
    with now[0].publish("job/0", "new:1"):
        assert now[1].read("job/0", time.monotonic() + 10) == "new:1"
