"""`dpcore inspect --job`, run on one host, names the rank that holds up a job over two hosts.

Each hang is a job of two ranks, one per network namespace; rank 0 is on host 0. The command is told
one process, and reads the memory of that one only, so what it says of the other rank has come over
the network while the job ran. The hangs stand side by side, since each has to be a few seconds old.
"""

import contextlib
import json
import subprocess
import sys
import time

import pytest

from . import hosts as namespaces

needs_hosts = pytest.mark.skipif(bool(namespaces.why_not()), reason=namespaces.why_not() or "-")

BEGIN = """
import warnings; warnings.simplefilter("ignore")
import os, signal, sys, threading, time, torch, dpcore as dp
comm = dp.init(timeout=300, init_method={method!r}, transport="tcp")
t = torch.ones(8)
comm.all_reduce(t)
print("met", flush=True)
"""
# What each rank does; who is to blame, in which operation; what is said of the culprit on the
# other's host, and on its own.
HANGS = {
    "stopped": (
        "comm.all_reduce(t)",
        "time.sleep(1.5); os.kill(os.getpid(), signal.SIGSTOP)",  # it has heard of rank 0's call
        [1], "all_reduce", "has said nothing for", "is stopped, by SIGSTOP",
    ),
    "calls nothing": (
        "comm.broadcast(t, 1)",
        "def wait_for_a_better_loss():\n    while True: time.sleep(0.05)\nwait_for_a_better_loss()",
        [1], "broadcast", "in wait_for_a_better_loss", "in wait_for_a_better_loss",
    ),
    "data loader": (
        "comm.all_reduce(t)",
        """
from torch.utils.data import DataLoader
class Slow(list):
    def __getitem__(self, index):
        while os.getppid() == PARENT: time.sleep(0.1)
PARENT = os.getpid()
for batch in DataLoader(Slow(range(9)), num_workers=1):
    comm.all_reduce(t)
""",
        [1], "all_reduce", "which waits for a data loader", "which waits for a data loader",
    ),
    "recv without a sender": (
        "comm.barrier()",
        "comm.recv(t[:3], 0, tag=5)",
        [1], "recv", "recv of 12 bytes from rank 0", "No rank has sent what rank 1 waits for",
    ),
    "two groups, two orders": (
        "one, two = comm.split(0), comm.split(0)\none.all_reduce(t); two.all_reduce(t)",
        "one, two = comm.split(0), comm.split(0)\ntwo.all_reduce(t); one.all_reduce(t)",
        [0, 1], "all_reduce", "group 1 of ranks 0, 1", "group 2 of ranks 0, 1",
    ),
    "disk full": (
        """
def save_checkpoint():
    while True:
        try:
            with open("/dev/full", "w") as file: file.write("weights")
        except OSError: time.sleep(0.2)
save_checkpoint()
""",
        "comm.barrier()",
        [0], "barrier", "in save_checkpoint", "in save_checkpoint",
    ),
    "fewer batches": (
        "for batch in range(4): comm.all_reduce(t)",
        """
def evaluate():
    lock = threading.Lock(); lock.acquire(); lock.acquire()
for batch in range(3): comm.all_reduce(t)
evaluate()
""",
        [1], "all_reduce", "in evaluate", "in evaluate",
    ),
    "cable": (
        "while True: comm.barrier(); time.sleep(0.02)",
        "while True: comm.barrier(); time.sleep(0.02)",
        [1], "barrier", "has said nothing for", "has said nothing for",
    ),
}  # fmt: skip


def inspect(made, host, pid):
    """What `dpcore inspect --job` says on a host, and how long it took."""
    command = [sys.executable, "-m", "dpcore", "inspect", "--job", "--json", str(pid)]
    began = time.monotonic()
    out = subprocess.run(made.inside(host, *command), capture_output=True, text=True, timeout=60)
    seconds = time.monotonic() - began
    assert out.returncode == 0, out.stderr
    return json.loads(out.stdout), seconds


@pytest.fixture(scope="module")
def hanging():
    """Two hosts, and by hang the process of either rank."""
    with namespaces.hosts(2) as made, contextlib.ExitStack() as cleaning:
        jobs = {}
        for at, (name, (*steps, _, _, _, _)) in enumerate(HANGS.items()):
            jobs[name] = []
            for rank, step in enumerate(steps):
                script = BEGIN.format(method=f"tcp://{made.address(0)}:{29700 + at}") + step
                process = made.fork(rank, script, {"RANK": str(rank), "WORLD_SIZE": "2"})
                cleaning.callback(process.wait)
                cleaning.callback(process.kill)
                jobs[name].append(process)
        for ranks in jobs.values():
            for rank in ranks:
                assert rank.stdout.readline() == "met\n", rank.communicate()
        time.sleep(6.0)  # beyond what silence takes to be noticed
        yield made, {name: [rank.pid for rank in ranks] for name, ranks in jobs.items()}


def check(made, pids, name):
    """From each of the two hosts; within two seconds on one of three occasions."""
    *_, culprits, operation, afar, near = HANGS[name]
    times = []
    for host, pid in enumerate(pids):
        said, seconds = inspect(made, host, pid)
        times.append(seconds)
        text = "\n".join(said["says"])
        assert said["hangs"], said
        if name == "cable":  # each host sees the other one go
            assert said["culprits"] == [1 - host], said
        else:
            assert said["culprits"] == culprits, said
        details = said["operation"]
        assert details.get("collective", details.get("direction")) == operation, said
        expected = [near if host in culprits else afar] if len(culprits) == 1 else [afar, near]
        assert all(words in text for words in expected), text
        known = {rank["rank"]: rank["pid"] for rank in said["ranks"]}
        assert known == {host: pid, 1 - host: None}
    assert min(times) < 2.0 or inspect(made, 0, pids[0])[1] < 2.0, times


@needs_hosts
@pytest.mark.parametrize("name", [name for name in HANGS if name != "cable"])
def test_the_culprit_is_named(hanging, name):
    made, jobs = hanging
    check(made, jobs[name], name)


@needs_hosts
def test_a_host_that_is_cut_off_is_named(hanging):
    made, jobs = hanging
    made.cable(1, "down")
    time.sleep(4.0)
    check(made, jobs["cable"], "cable")
