"""Ranks that do not find each other, and what those who came are told."""

import os
import signal
import socket
import sys
import time

import cloudpickle
import pytest

import dpcore as dp
from dpcore.launch import find_place
from dpcore.ranks import run_processes, run_threads

cloudpickle.register_pickle_by_value(sys.modules[__name__])

TIMEOUT = 0.6


def meet(claims, transport="auto"):
    """A body for ranks: each closes the communicator it was given and claims another place.

    ``claims[r]``: (rank, world, seconds to wait before), or None to stay away.
    """

    def body(comm):
        place, process = claims[comm.rank], os.getpid()
        meeting = f"meet-{os.getppid()}-{len(claims)}"
        dp.finalize()
        if place is None:
            return process, "away", "", 0.0
        time.sleep(place[2])
        begin = time.monotonic()
        try:
            dp.init(
                rank=place[0], world_size=place[1], init_method=meeting,
                timeout=TIMEOUT, transport=transport,
            )  # fmt: skip
        except dp.RendezvousError as error:
            return process, "RendezvousError", str(error), time.monotonic() - begin
        return process, "met", "", time.monotonic() - begin

    return body


def outcomes_of(claims, transport="auto"):
    run = run_threads if transport == "inproc" else run_processes
    outcomes = run(meet(claims, transport), len(claims))
    assert [outcome.error for outcome in outcomes] == [None] * len(claims), outcomes
    return [outcome.result for outcome in outcomes]


@pytest.mark.parametrize("transport", ["auto", "inproc"])
def test_everybody_who_came_hears_which_ranks_are_missing(transport):
    results = outcomes_of([(0, 4, 0), None, (2, 4, 0), None], transport)
    for result in (results[0], results[2]):
        assert result[1] == "RendezvousError"
        assert "2 of 4 ranks came; missing: 1, 3" in result[2]
        assert 0.9 * TIMEOUT < result[3] < TIMEOUT + 1


def test_rank_0_is_missing():
    results = outcomes_of([None, (1, 3, 0), (2, 3, 0)])
    for result in results[1:]:
        assert "rank 0 did not come to" in result[2]
        assert 0.9 * TIMEOUT < result[3] < TIMEOUT + 1


def test_two_processes_claim_the_same_rank():
    results = outcomes_of([(0, 3, 0), (1, 3, 0), (1, 3, 0.2)])
    first = results[1][0]
    assert f"rank 1 is there already (process {first})" in results[2][2]
    assert results[2][3] < TIMEOUT / 2  # refused at once
    for result in results[:2]:
        assert "missing: 2; refused: rank 1 is there already" in result[2]


def test_two_processes_claim_rank_0():
    results = outcomes_of([(0, 3, 0), (1, 3, 0), (0, 3, 0.2)])
    assert "another process is already rank 0 of" in results[2][2]
    assert "choose another MASTER_PORT or init_method" in results[2][2]
    assert results[2][3] < TIMEOUT / 2


def test_ranks_of_different_worlds():
    results = outcomes_of([(0, 3, 0), (1, 3, 0), (2, 4, 0.1)])
    assert "refused by rank 0: world size 4 on rank 2, 3 on rank 0" in results[2][2]
    for result in results[:2]:
        assert "world size 4 on rank 2, 3 on rank 0" in result[2]


def test_the_name_is_taken_by_a_stranger():
    """Somebody else listens there: rank 0 says so at once, the others at the deadline."""
    stranger = socket.socket(socket.AF_UNIX)
    stranger.bind("\0" + find_place(0, 2, "stranger").job + "/0")
    stranger.listen()

    def join(comm):
        dp.finalize()
        begin = time.monotonic()
        try:
            dp.init(rank=comm.rank, world_size=2, init_method="stranger", timeout=TIMEOUT)
        except dp.RendezvousError as error:
            return str(error), time.monotonic() - begin
        return None

    with stranger:
        results = [outcome.result for outcome in run_processes(join, 2)]
    assert "another process is already rank 0" in results[0][0]
    assert results[0][1] < TIMEOUT / 2
    assert "rank 1: rank 0 listens at" in results[1][0]
    assert "did not answer before the deadline" in results[1][0]
    assert results[1][1] < TIMEOUT + 2


def test_a_rank_dies_while_the_others_meet():
    """It came, and is gone when the last one comes: everybody names it and nobody else."""

    def body(comm):
        dp.finalize()
        if comm.rank == 1:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, 0.15)
        if comm.rank == 2:
            time.sleep(0.4)
        begin = time.monotonic()
        try:
            second = dp.init(rank=comm.rank, world_size=3, init_method="dies", timeout=5)
            second.barrier()
        except dp.Error as error:
            return str(error), time.monotonic() - begin
        return None

    outcomes = run_processes(body, 3, grace=2)
    assert outcomes[1].exit_code == -signal.SIGALRM
    for outcome in (outcomes[0], outcomes[2]):
        message, seconds = outcome.result
        assert "rank 1 (process " in message and "died" in message
        assert seconds < 2


def test_survivors_start_again_without_the_dead():
    def body(comm):
        ones = comm.empty(1000).fill_(1)
        with pytest.raises(dp.PeerLost, match="rank 1 "):
            for _ in range(10):
                comm.all_reduce(ones)
        dp.finalize()
        place = {0: 0, 2: 1, 3: 2}[comm.rank]
        again = dp.init(rank=place, world_size=3, init_method="the rest", timeout=10)
        ones = again.empty(1000).fill_(1)
        again.all_reduce(ones)
        return ones.unique().tolist()

    outcomes = run_processes(body, 4, environment={"DPCORE_FAULT": "kill:rank1:op5:middle"})
    assert [outcome.result for outcome in outcomes] == [[3.0], None, [3.0], [3.0]]


def test_ctrl_c_while_waiting_for_the_others():
    def body(comm):
        dp.finalize()
        if comm.rank == 0:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            signal.signal(signal.SIGALRM, signal.default_int_handler)
        begin = time.monotonic()
        with pytest.raises(KeyboardInterrupt if comm.rank == 0 else dp.RendezvousError) as caught:
            dp.init(rank=comm.rank, world_size=3, init_method="ctrl-c", timeout=20)
        return str(caught.value), time.monotonic() - begin

    outcomes = run_processes(body, 2)
    assert outcomes[0].result[1] < 2
    message, seconds = outcomes[1].result
    assert "rank 0 went away while the ranks were meeting" in message
    assert seconds < 3
