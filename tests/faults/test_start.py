"""Ranks that do not find each other, and what those who came are told."""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import cloudpickle
import pytest
import torch

import dpcore as dp
from dpcore.comm.launch import session
from dpcore.comm.launch.identity import find_identity
from dpcore.comm.launch.spawn import run_processes, run_threads

from .tries import in_time, three_tries

cloudpickle.register_pickle_by_value(sys.modules[__name__])

TIMEOUT = 0.6


def meet(claims, transport="auto"):
    """A body for ranks: each closes the communicator it was given and claims another place.

    ``claims[r]``: (rank, world, seconds to wait before), or None to stay away.
    """

    def body(comm):
        place = claims[comm.rank]
        rendezvous = f"meet-{os.getppid()}-{len(claims)}"
        dp.finalize()
        came = SimpleNamespace(process=os.getpid(), how="away", text="", begin=None, end=None)
        if place is None:
            return came
        time.sleep(place[2])
        came.begin = time.monotonic()
        try:
            dp.init(
                rank=place[0], world_size=place[1], init_method=rendezvous,
                timeout=TIMEOUT, transport=transport,
            )  # fmt: skip
            came.how = "met"
        except dp.RendezvousError as error:
            came.how, came.text = "RendezvousError", str(error)
        came.end = time.monotonic()
        return came

    return body


def outcomes_of(claims, transport="auto"):
    run = run_threads if transport == "inproc" else run_processes
    outcomes = run(meet(claims, transport), len(claims))
    assert [outcome.error for outcome in outcomes] == [None] * len(claims), outcomes
    results = [outcome.result for outcome in outcomes]
    begins = [result.begin for result in results if result.begin is not None]
    # Whoever comes when the others have given up hears something else.
    in_time(max(begins) - min(begins) < TIMEOUT / 2, "they did not come together")
    return results


@pytest.mark.parametrize("transport", ["auto", "inproc"])
@three_tries
def test_everybody_who_came_hears_which_ranks_are_missing(transport):
    results = outcomes_of([(0, 4, 0), None, (2, 4, 0), None], transport)
    came = (results[0], results[2])
    first = min(result.begin for result in came)  # whose patience ends first
    for result in came:
        assert result.how == "RendezvousError"
        assert "2 of 4 ranks came; missing: 1, 3" in result.text
        assert result.end - first > 0.9 * TIMEOUT
        in_time(result.end - first < TIMEOUT + 1)


@three_tries
def test_rank_0_is_missing():
    results = outcomes_of([None, (1, 3, 0), (2, 3, 0)])
    for result in results[1:]:
        assert "rank 0 did not come to" in result.text
        assert result.end - result.begin > 0.9 * TIMEOUT
        in_time(result.end - result.begin < TIMEOUT + 1)


@three_tries
def test_two_processes_claim_the_same_rank():
    results = outcomes_of([(0, 3, 0), (1, 3, 0), (1, 3, 0)])
    came_second = "refused by rank 0: rank 1"
    refused, first = sorted(results[1:], key=lambda result: came_second not in result.text)
    assert f"refused by rank 0: rank 1 is there already (process {first.process})" in refused.text
    for result in (results[0], first):
        assert "missing: 2; refused: rank 1 is there already" in result.text
    all_there = max(result.begin for result in results)
    in_time(refused.end - all_there < TIMEOUT / 2, "not refused at once")


@three_tries
def test_two_processes_claim_rank_0():
    results = outcomes_of([(0, 3, 0), (1, 3, 0), (0, 3, 0)])
    second, first = sorted(results[::2], key=lambda result: "another" not in result.text)
    assert "another process is already rank 0 of" in second.text
    assert "choose another MASTER_PORT or init_method" in second.text
    assert "another" not in first.text
    in_time(second.end - second.begin < TIMEOUT / 2, "not refused at once")


@three_tries
def test_ranks_of_different_worlds():
    results = outcomes_of([(0, 3, 0), (1, 3, 0), (2, 4, 0.1)])
    assert "refused by rank 0: world size 4 on rank 2, 3 on rank 0" in results[2].text
    for result in results[:2]:
        assert "world size 4 on rank 2, 3 on rank 0" in result.text


@three_tries
def test_the_name_is_taken_by_a_stranger():
    """Somebody else listens there: rank 0 says so at once, the others at the deadline."""
    stranger = socket.socket(socket.AF_UNIX)
    stranger.bind("\0" + find_identity(0, 2, "stranger").job + "/0")
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
    in_time(results[0][1] < TIMEOUT / 2)
    assert "rank 1: rank 0 listens at" in results[1][0]
    assert "did not answer before the deadline" in results[1][0]
    in_time(results[1][1] < TIMEOUT + 2)


def test_silent_connections_of_the_same_user_cost_nothing():
    """Three of them, one after the other, would take 15 seconds."""
    name = f"silent-{os.getpid()}-{time.monotonic_ns()}"
    results = {}

    def rank(number):
        try:
            session.connect(name, number, 2, timeout=12).close()
            results[number] = "met"
        except dp.Error as problem:
            results[number] = str(problem)

    first = threading.Thread(target=rank, args=(0,))
    first.start()
    with contextlib.ExitStack() as silent:
        for _ in range(3):
            line = silent.enter_context(socket.socket(socket.AF_UNIX))
            while line.connect_ex(f"\0{name}") != 0:  # rank 0 is not there yet
                time.sleep(0.01)
        rank(1)
        first.join()
    assert results == {0: "met", 1: "met"}


@pytest.mark.patient
def test_a_rank_that_gave_up_is_no_rank_of_the_job():
    """It lives, so nothing would tell the others that it never comes."""
    name = f"gave-up-{os.getpid()}-{time.monotonic_ns()}"

    def join(rank, timeout):
        with pytest.raises(dp.RendezvousError) as caught:
            session.connect(name, rank, 3, timeout=timeout)
        return str(caught.value)

    with ThreadPoolExecutor(3) as ranks:
        first = ranks.submit(join, 0, 30)
        assert "did not answer before the deadline" in join(1, 0.2)
        last = ranks.submit(join, 2, 30)
        said = "rank 1 came and gave up before the last one was there"
        assert first.result(10).startswith(f"rank 0: {said}")
        assert last.result(10).startswith(f"rank 2: refused by rank 0: {said}")


def test_ranks_that_have_failed_a_different_number_of_times_meet(tmp_path):
    """Rank 0 came too early once. What counts is how often they have met."""

    def body(comm, gave_up):
        dp.finalize()
        where = {"rank": comm.rank, "world_size": 2, "init_method": "again"}
        if comm.rank == 0:
            with pytest.raises(dp.RendezvousError, match="missing: 1"):
                dp.init(**where, timeout=0.2)
            gave_up.touch()
        while not gave_up.exists():
            time.sleep(0.005)
        total = torch.ones(3)
        dp.init(**where, timeout=20).all_reduce(total)
        return total.tolist()

    outcomes = run_processes(body, 2, (tmp_path / "gave up",))
    assert [outcome.result for outcome in outcomes] == [[2.0] * 3] * 2


def handles(process):
    """How many pidfds a process has open; rank 0 gets one of every rank that it lets in."""
    number = 0
    for info in Path(f"/proc/{process}/fdinfo").iterdir():
        with contextlib.suppress(OSError):
            number += "\nPid:" in info.read_text()
    return number


def announce(folder, rank):
    written = folder / f"{rank}.new"
    written.write_text(f"{os.getpid()} {handles(os.getpid())}")
    written.rename(folder / str(rank))


def wait_until_accepted(folder):
    """The processes of the ranks 0 and 1, once the one has let in the other."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if (folder / "0").exists() and (folder / "1").exists():
            host, had_before = map(int, (folder / "0").read_text().split())
            if handles(host) > had_before:
                return host, int((folder / "1").read_text().split()[0])
        time.sleep(0.005)
    raise AssertionError("rank 0 does not let in rank 1")


@three_tries
def test_a_rank_dies_while_the_others_meet(tmp_path):
    """It came, and is gone when the last one comes: everybody names it and nobody else."""

    def body(comm, folder):
        dp.finalize()
        announce(folder, comm.rank)
        killed_at = None
        if comm.rank == 2:
            os.kill(wait_until_accepted(folder)[1], signal.SIGKILL)
            killed_at = time.monotonic()
            time.sleep(0.1)
        try:
            second = dp.init(rank=comm.rank, world_size=3, init_method="dies", timeout=20)
            second.barrier()
        except dp.Error as error:
            return str(error), time.monotonic(), killed_at
        return None

    outcomes = run_processes(body, 3, (fresh(tmp_path),), grace=20)
    assert outcomes[1].exit_code == -signal.SIGKILL
    killed_at = outcomes[2].result[2]
    for outcome in (outcomes[0], outcomes[2]):
        message, heard_at, _ = outcome.result
        assert "rank 1 (process " in message and "died" in message
        in_time(heard_at - killed_at < 2)


def fresh(folder):
    folder /= str(time.monotonic_ns())
    folder.mkdir()
    return folder


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


@three_tries
def test_ctrl_c_while_waiting_for_the_others(tmp_path):
    def body(comm, folder):
        dp.finalize()
        if comm.rank == 2:  # which stays away
            host, _ = wait_until_accepted(folder)
            interrupted_at = time.monotonic()
            os.kill(host, signal.SIGALRM)
            return "", interrupted_at
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        announce(folder, comm.rank)
        with pytest.raises(KeyboardInterrupt if comm.rank == 0 else dp.RendezvousError) as caught:
            dp.init(rank=comm.rank, world_size=3, init_method="ctrl-c", timeout=20)
        return str(caught.value), time.monotonic()

    outcomes = run_processes(body, 3, (fresh(tmp_path),))
    (_, ended_at), (message, heard_at), (_, interrupted_at) = [o.result for o in outcomes]
    assert "rank 0 went away while the ranks were meeting" in message
    assert ended_at > interrupted_at
    in_time(ended_at - interrupted_at < 2)
    in_time(heard_at - interrupted_at < 3)
