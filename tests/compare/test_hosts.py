"""Hosts of one machine: why there are none, their TCP, and that they go with a terminated run."""

import subprocess
import sys

import pytest

from dpcore.tools import hosts
from dpcore.tools.records import ROOT

HELD = """
from dpcore.tools.hosts import hosts
with hosts(1) as made:
    print(made.switch, flush=True)
    input()
"""

needs_namespaces = pytest.mark.skipif(
    bool(hosts.why_not()), reason=hosts.why_not() or "namespaces can be made"
)


@pytest.mark.parametrize("lacking", ["tbf", "veth", "bridge"])
def test_a_kernel_that_cannot_shape_links_says_so(monkeypatch, lacking):
    """Some let namespaces be made and have no queues or cables for them."""
    called = []

    def run(command, **_):
        called.append(command)
        status = int(lacking in command)
        return subprocess.CompletedProcess(command, status, "", "Unknown device type." * status)

    monkeypatch.setattr(hosts.shutil, "which", lambda name: f"/sbin/{name}")
    monkeypatch.setattr(hosts.subprocess, "run", run)
    assert hosts.why_not.__wrapped__().endswith("Unknown device type.")
    assert called[-1][:3] == ["ip", "netns", "del"]


@needs_namespaces
def test_all_have_the_same_tcp_whatever_the_default_of_the_machine_is():
    with hosts.hosts(2) as made:
        for host in range(2):
            read = made.inside(host, "cat", *hosts.TCP)
            found = subprocess.run(read, capture_output=True, text=True).stdout.split()
            assert found == list(hosts.TCP.values())


@needs_namespaces
def test_a_terminated_run_removes_its_hosts():
    held = subprocess.Popen(
        [sys.executable, "-c", HELD],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    switch = held.stdout.readline().strip()
    assert switch in names()
    held.terminate()
    held.communicate(timeout=30)
    assert held.returncode == 128 + 15
    assert switch not in names()


def names():
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [line.split()[0] for line in listed.stdout.splitlines()]
