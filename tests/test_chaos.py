"""dpcore chaos: ranks are killed, stopped and started again, and the figures are right."""

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import time
from types import SimpleNamespace

import pytest

from dpcore.__main__ import main
from dpcore.base.processes import look_around
from dpcore.ddp.elastic.progress import VARIABLE, teller
from dpcore.tools.chaos import program
from dpcore.tools.chaos.command import Chaos
from dpcore.tools.chaos.faults import faults
from dpcore.tools.chaos.figures import Struck
from dpcore.tools.chaos.job import Step
from tests.ranks.python import start

# What the ranks' wall clock says jumps by hours, three times a second.
JUMPING_CLOCK = """
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
extern "C" int clock_gettime(clockid_t which, struct timespec* time) {
  const long failed = syscall(SYS_clock_gettime, which, time);
  if (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE) {
    timespec steady;
    syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &steady);
    const long thirds = steady.tv_sec * 3 + steady.tv_nsec / 333333334;
    time->tv_sec += (thirds * 2654435761 % 7 - 3) * 3600;
  }
  return static_cast<int>(failed);
}
"""


@pytest.fixture(params=[False, True], ids=["", "the clock jumps"])
def clock(request, tmp_path, monkeypatch):
    if request.param:
        library = tmp_path / "clock.so"
        command = ["g++", "-x", "c++", "-shared", "-fPIC", "-o", library, "-"]
        subprocess.run(command, input=JUMPING_CLOCK, text=True, check=True)
        monkeypatch.setenv("LD_PRELOAD", str(library))
        now = "date +%H; sleep 0.4; date +%H; sleep 0.4; date +%H"
        hours = subprocess.run(["sh", "-c", now], capture_output=True, check=True).stdout.split()
        assert len(set(hours)) > 1  # it does jump


@pytest.mark.usefixtures("clock")
def test_it_kills_stops_and_restarts_and_the_weights_are_right(capfd):
    arguments = ["--world", "3", "--mtbf", "0.2", "--faults", "2", "--seed", "23", "--json"]
    assert main(["chaos", *arguments]) == 0
    said = json.loads(capfd.readouterr().out)
    assert said["faults"] == {"kill": 1, "stop": 1} and said["joined"] == 1
    for name in ("kill_to_step", "stop_to_step", "start_to_step"):
        assert len(said[name]) == 1, name
    assert (said["hangs"], said["wrong"], said["left"]) == ([], [], [])
    assert 0 < said["goodput"] <= 1 and said["steps"] > 3


def test_its_ranks_end_with_it_however_it_ends():
    words = ["-m", "dpcore", "chaos", "--world", "3", "--mtbf", "600"]
    chaos = start(*words, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while len(ranks := children_of(chaos.pid)) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    ends = [os.pidfd_open(rank) for rank in ranks]
    chaos.kill()
    chaos.wait()
    for end in ends:
        ended = select.select([end], [], [], 30)[0]
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(end, signal.SIGKILL)
        os.close(end)
        assert ended, "it lives on"


def children_of(process):
    return [pid for pid, seen in look_around().items() if seen.parent == process]


def test_a_program_that_fails_is_told(capfd):
    assert main(["chaos", "--world", "3", "--", "sh", "-c", "exit 3"]) == 1
    said = capfd.readouterr().out
    assert "ended with status 3" in said
    rows = dict(line.split("  ", 1) for line in said.splitlines())
    assert rows["a step"].strip() == "none"
    seconds = re.fullmatch(r"0\.000 of (\d+\.\d) s", rows["goodput"].strip())[1]
    assert float(seconds) < 60  # and not those since the machine began


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--kinds", "flood"], "'flood' is none of"),
        (["--kinds", "cut"], "--hosts 2"),
        (["--world", "2"], "kills need 3 ranks"),
    ],
)
def test_what_it_cannot_do_it_says(arguments, says, capfd):
    assert main(["chaos", *arguments]) == 2
    assert says in capfd.readouterr().err


def test_ranks_do_not_wait_for_the_command_to_listen(tmp_path, monkeypatch):
    address = str(tmp_path / "told")
    monkeypatch.setenv(VARIABLE, address)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        line.bind(address)
        tell = teller()
        assert teller() is tell  # or the lines of two would overtake each other
        for step in range(2000):  # more than any socket holds
            tell("step", step=step)
        line.setblocking(False)
        heard, told = [], 2000
        while len(heard) < told:
            try:
                heard.append(json.loads(line.recv(1 << 16))["step"])
            except BlockingIOError:
                tell("step", step=told)  # takes along what was not sent
                told += 1
    assert heard == list(range(told))


@pytest.mark.parametrize(("digest", "problems"), [("b", 0), ("c", 1)])
def test_weights_are_checked_as_far_as_all_steps_were_told(digest, problems, monkeypatch):
    """Step 3 waits in a rank whose socket was full; one that has joined has told of step 4."""
    chaos = Chaos.__new__(Chaos)
    told = {1: "a", 2: digest, 4: "x"}
    steps = {step: Step(step, 0.0, (0, 1), {said}) for step, said in told.items()}
    chaos._job, chaos._problems = SimpleNamespace(steps=steps), {"wrong": []}
    monkeypatch.setattr(program, "replayed", lambda ranks, last: {2: "b"}[last])
    chaos._check_bits()
    assert len(chaos._problems["wrong"]) == problems


def test_faults_follow_from_the_seed():
    def first(seed):
        coming = faults(seed, 1.0, ["kill", "stop"])
        return [next(coming) for _ in range(20)]

    assert first(1) == first(1) != first(2)
    assert {fault.kind for fault in first(1)} == {"kill", "stop"}


def test_a_step_that_the_victim_took_is_not_the_next_one():
    struck = Struck("kill", 10.0, (1,))
    struck.hears(Step(4, 10.1, (0, 1, 2)))
    assert struck.stepped is None
    struck.hears(Step(4, 10.2, (0, 2)))
    struck.hears(Step(5, 10.3, (0, 2)))
    assert struck.stepped == 10.2
