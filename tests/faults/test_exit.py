"""How ranks end (5, 6, 25, 27): without finalize, with work in flight, by Ctrl-C, all at once."""

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import cloudpickle
import pytest
import torch

import dpcore as dp
from dpcore.base.processes import look_around
from dpcore.comm.launch.spawn import run_processes

from .leftovers import of_this_host
from .tries import in_time, three_tries

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROOT = Path(__file__).resolve().parents[2]

LAUNCHER = """
import os, sys, time
from dpcore.comm.launch.spawn import run_processes

def body(comm, folder):
    for call in range(10**9):
        comm.all_reduce(comm.empty(1000))
        if call == 20:
            with open(os.path.join(folder, str(os.getpid())), "w"):
                pass
        time.sleep(0.001)

run_processes(body, 3, (sys.argv[1],))
"""


@pytest.fixture(scope="module")
def ends():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    script = str(Path(__file__).with_name("exits.py"))
    run = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True, timeout=200
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.patient
@pytest.mark.parametrize(
    "case",
    [
        "without finalize",
        "kept by a module",
        "in flight",
        "callback at the end",
        "session inherited",
    ],
)
def test_clean_end_without_finalize(ends, case):
    assert ends[case] and all(end == [0, ""] for end in ends[case]), ends[case]


@pytest.mark.patient
def test_sys_exit_with_operations_in_flight(ends):
    assert all(end == [3, ""] for end in ends["in flight, sys.exit"]), ends


@pytest.mark.patient
def test_exception_with_operations_in_flight(ends):
    """The rank that is still submitting when the other gives up hears of its exception."""
    words = "KeyError: 'not found, 5 in flight'"
    last_lines = [errors.rstrip().splitlines()[-1] for _, errors in ends["in flight, exception"]]
    assert [code for code, _ in ends["in flight, exception"]] == [1] * len(last_lines)
    assert words in last_lines
    for line in last_lines:
        assert line == words or ("PeerLost" in line and f"gave up: {words}" in line), line


@pytest.mark.patient
def test_exception_while_the_other_rank_waits(ends):
    for rank, (code, errors) in enumerate(ends["exception on rank 1"]):
        assert code == 1
        if rank % 2 == 1:
            assert errors.rstrip().endswith("ValueError: bad batch")
        else:
            assert "PeerLost: rank 0: rank 1 gave up: ValueError: bad batch" in errors


@pytest.mark.patient
def test_a_daemon_thread_in_a_wait_does_not_hold_up_the_end(ends):
    assert [code for code, _ in ends["a thread waits"]] == [0, 0], ends["a thread waits"]


@pytest.mark.patient
@pytest.mark.parametrize(
    "case, words",
    [
        ("unheard", "rank 1"),
        ("last update", "bucket 0 (2 gradients"),
        ("last update of a lost model", "bucket 0 (2 gradients"),
    ],
)
def test_a_failure_that_no_call_has_raised_ends_the_program_with_an_error(ends, case, words):
    (code, errors), other = ends[case]
    last_line = errors.rstrip().splitlines()[-1]
    assert code == 1 and last_line.startswith("dpcore.errors.PeerLost: ") and words in last_line
    assert "finalized and left" in last_line
    assert ("Exception ignored" in errors) == ("lost" in case)
    assert other == [0, ""]


@pytest.mark.patient
def test_another_status_stays(ends):
    assert [code for code, _ in ends["unheard, sys.exit"]] == [3, 0]


@pytest.fixture
def launched(tmp_path):
    """A launcher and three ranks in the midst of work, in a process group of their own."""
    folder = tmp_path / "ranks"
    folder.mkdir()
    temporary = Path(tempfile.mkdtemp())  # a folder of pytest's may be too long for a socket
    before = of_this_host()
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(folder)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)},
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 60
        while len(list(folder.iterdir())) < 3 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert set(map(int, os.listdir(folder))) < set(in_group(launcher.pid))
        yield launcher
        assert list(temporary.iterdir()) == []
        assert of_this_host() == before
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
        shutil.rmtree(temporary)


def in_group(group):
    """Processes of this group that run (those that ended may wait for init to bury them)."""
    everyone = look_around().items()
    return [pid for pid, seen in everyone if seen.group == group and seen.state not in "ZX"]


def all_gone(group, within=30.0):
    deadline = time.monotonic() + within
    while in_group(group) and time.monotonic() < deadline:
        time.sleep(0.02)
    return in_group(group) == []


def test_the_launcher_is_killed(launched):
    """Its ranks end as well, and the server that they came from: nobody works on unseen."""
    launched.kill()
    launched.wait()
    assert all_gone(launched.pid)


def test_launcher_and_ranks_are_killed(launched):
    os.killpg(launched.pid, signal.SIGKILL)
    launched.wait()
    assert all_gone(launched.pid)


@pytest.mark.patient
def test_no_memory_has_a_name_while_ranks_live():
    def body(comm):
        comm.all_reduce(comm.empty(1 << 20))
        maps = Path("/proc/self/maps").read_text()
        return "/dev/shm" in maps, "memfd:dpcore-arena" in maps

    outcomes = run_processes(body, 2)
    assert [outcome.result for outcome in outcomes] == [(False, True)] * 2


def are_passed_over():
    """By a dump of this process, for each mapping of an arena."""
    blocks = Path("/proc/self/smaps").read_text().split("VmFlags: ")
    return [
        "dd" in after.splitlines()[0].split()
        for before, after in itertools.pairwise(blocks)
        if "memfd:dpcore-arena" in before
    ]


@pytest.mark.patient
def test_a_core_dump_passes_over_the_arenas():
    """They reserve hundreds of GiB: while a crashed rank is being dumped, it is not gone."""

    def body(comm):
        comm.all_reduce(torch.ones(10))
        child = os.fork()
        if child == 0:
            os._exit(0 if are_passed_over() == [True] else 1)
        return are_passed_over(), os.waitpid(child, 0)[1]

    # A rank's own and the peer's, which a forked child does not have.
    assert [outcome.result for outcome in run_processes(body, 2)] == [([True, True], 0)] * 2


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("how", ["sync", "async", "message", "split"])
@three_tries
def test_ctrl_c_in_a_wait(how, transport, tmp_path):
    """KeyboardInterrupt soon, and the peers, who wait as well, hear of it and from whom."""
    marks = [tmp_path / f"{rank}-{time.monotonic_ns()}" for rank in range(2)]

    def body(comm):
        interrupted_at = []

        def interrupt():
            interrupted_at.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

        comm.barrier()
        if comm.rank == 2:
            patience = time.monotonic() + 20
            while not all(mark.exists() for mark in marks) and time.monotonic() < patience:
                time.sleep(0.01)
            return None
        try:
            if comm.rank == 1:
                threading.Timer(0.3, interrupt).start()
            if how == "sync":
                comm.all_reduce(torch.ones(10))
            elif how == "async":
                comm.all_reduce(torch.ones(10), async_op=True).wait()
            elif how == "message" and comm.rank == 1:
                comm.recv(torch.ones(10), 2)
            elif how == "split":
                comm.split(0)
            comm.barrier()
        except (KeyboardInterrupt, dp.PeerLost) as error:
            ended_at = time.monotonic()
            with pytest.raises(dp.PeerLost, match="rank 1 was interrupted during"):
                comm.barrier()
            marks[comm.rank].touch()
            return type(error).__name__, str(error), ended_at, interrupted_at
        return None

    outcomes = run_processes(body, 3, options={"transport": transport})
    assert outcomes[1].result[0] == "KeyboardInterrupt"
    assert outcomes[0].result[0] == "PeerLost"
    assert "rank 1 was interrupted during" in outcomes[0].result[1]
    (interrupted_at,) = outcomes[1].result[3]
    for rank in (0, 1):
        seconds = outcomes[rank].result[2] - interrupted_at
        assert seconds >= 0
        in_time(seconds < 1)


def test_other_signals_while_waiting_change_nothing():
    """A child ends (SIGCHLD), and a handled signal comes a hundred times a second."""

    def body(comm):
        seen = []
        signal.signal(signal.SIGALRM, lambda *_: seen.append("alarm"))
        signal.signal(signal.SIGCHLD, lambda *_: seen.append("child"))
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
        child = os.fork()
        if child == 0:
            time.sleep(0.1)
            os._exit(0)
        total = torch.zeros(1000)
        for step in range(30):
            if comm.rank == step % 2:
                time.sleep(0.02)
            total += 1
            comm.all_reduce(total, op="mean")
        os.waitpid(child, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        return total.unique().tolist(), "child" in seen, seen.count("alarm") > 5

    outcomes = run_processes(body, 2)
    assert [outcome.result for outcome in outcomes] == [([30.0], True, True)] * 2, outcomes


def test_a_process_that_takes_its_time_to_go_has_its_result():
    def body(comm):
        threading.Thread(target=time.sleep, args=(1.5,)).start()  # Python waits for it
        return comm.rank

    assert dp.spawn(body, 2) == [0, 1]
