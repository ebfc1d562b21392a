"""Networks that fail in less obvious ways: one direction only, a reset in the middle of a chunk, a
port that somebody else has. The hosts are network namespaces (hosts.py)."""

import subprocess
import sys
import time

import pytest

from . import hosts as namespaces
from .test_hosts import FOREVER, ONCE, PORT, Job, at

pytestmark = pytest.mark.skipif(bool(namespaces.why_not()), reason=namespaces.why_not() or "-")

LARGE = FOREVER.replace("100_000", "10_000_000").replace("time.sleep(0.005)", "pass")


def test_what_goes_to_one_host_is_lost():
    """It still sends, and hears nothing; both sides give up at the deadline and name the other."""
    with namespaces.hosts(2) as made:
        job = Job(made, (0, 1), FOREVER, at(made), timeout=2.0)
        job.wait_until_met()
        time.sleep(0.3)
        made.deafen(1)
        outputs, problems = job.said()
    for rank, output in enumerate(outputs):
        assert output.startswith(("Timeout rank ", "PeerLost rank ")), problems
        assert f"rank {1 - rank} " in output and "all_reduce of 100000 x float32" in output


@pytest.mark.patient
def test_a_break_that_is_shorter_than_the_deadline_costs_its_time_and_nothing_else():
    """In an operation, and while all ranks compute: longer than a kernel's own patience."""
    begin = "t = torch.full((100_000,), comm.rank + 1.0)\ncomm.all_reduce(t.clone())\n"
    waits = "until = time.monotonic() + 3\ngoes_on = torch.ones(1)\nwhile goes_on:\n"
    waits += "    comm.all_reduce(t.clone())\n    time.sleep(0.005)\n"
    waits += "    comm.all_reduce(goes_on.fill_(time.monotonic() < until), op='max')\n"
    computes = "time.sleep(21)\n"
    ends = "comm.all_reduce(t, op='mean')\nprint(t.unique().tolist())"
    with namespaces.hosts(2) as made:
        jobs = [
            Job(made, (0, 1), begin + steps + ends, at(made, port=PORT + i), 60.0)
            for i, steps in enumerate((waits, computes))
        ]
        for job in jobs:
            job.wait_until_met()
        time.sleep(0.5)
        made.cable(1, "down")
        time.sleep(18.5)
        made.cable(1, "up")
        for job in jobs:
            outputs, problems = job.said()
            assert outputs == ["[1.5]\n"] * 2, problems


def test_a_connection_is_reset_in_the_middle_of_a_chunk():
    """The one with the most to send: a chunk is on its way there. Nobody waits for the deadline."""
    with namespaces.hosts(2) as made:
        made.shape("100mbit")
        job = Job(made, (0, 1), LARGE, at(made), timeout=60.0)
        job.wait_until_met()
        time.sleep(0.5)
        port = made.busiest_port(1)
        began = time.monotonic()
        subprocess.run(made.inside(1, "ss", "-K", "sport", "=", port), capture_output=True)
        outputs, problems = job.said()
    assert time.monotonic() - began < 30
    for rank, output in enumerate(outputs):
        assert output.startswith(f"PeerLost rank {rank}: rank "), problems
        assert "is out of reach" in output and "all_reduce of 10000000 x float32" in output
    # Whoever noticed first is believed by the other.
    assert "a connection for data: " in outputs[0] + outputs[1]


def test_the_port_of_rank_0_is_taken_on_its_host():
    listener = f"import socket, sys; s = socket.create_server(('', {PORT})); print(flush=True)"
    with namespaces.hosts(2) as made:
        other = subprocess.Popen(
            made.inside(0, sys.executable, "-c", listener + "; sys.stdin.read()"),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        try:
            assert other.stdout.readline()  # it listens
            _, problems = Job(made, (0, 1), ONCE, at(made), timeout=3.0).said()
        finally:
            other.communicate()
    assert f"cannot listen at 10.77.0.1:{PORT}" in problems[0] and "choose another" in problems[0]
    assert "rank 1: a process listens as rank 0 at 10.77.0.1:" in problems[1], problems
