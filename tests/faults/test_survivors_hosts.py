"""Ranks on several hosts go on in a smaller communicator: after deaths, and after a cut network.

The hosts are network namespaces (hosts.py). test_survivors.py has what one host can show.
"""

import time

import pytest

from . import hosts as namespaces
from .test_hosts import Job, at

pytestmark = pytest.mark.skipif(bool(namespaces.why_not()), reason=namespaces.why_not() or "-")

# Rank 1 dies, and later the other rank of its host. A rank may have completed an operation that
# another has not, so they go on from the first of these.
TWO_DEATHS = """
import os, signal
own, ranks, step = comm.rank, list(range(comm.world_size)), 0
t = comm.empty(70_000)
while step < 12:
    if {4: 1, 8: 0}.get(step) == own:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        comm.all_reduce(t.fill_(own + 1.0))
    except dp.PeerLost:
        comm = comm.shrink()
        ranks = [ranks[rank] for rank in comm.survivors]
        steps, t = torch.empty(comm.world_size, dtype=torch.long), comm.empty(70_000)
        comm.all_gather(steps, torch.tensor([step]))
        step = int(steps.min())
        continue
    assert t.eq(sum(rank + 1.0 for rank in ranks)).all(), (own, step, t)
    step += 1
print(ranks, comm.transport)
"""
CUT = """
import os
t = torch.ones(1000)
try:
    for _ in range(1_000_000):
        comm.all_reduce(t.fill_(1))
        time.sleep(0.005)
except (dp.PeerLost, dp.Timeout):
    pass
try:
    comm = comm.shrink(2.0)
except dp.PeerLost as error:
    print(error, flush=True)
    os._exit(0)
comm.all_reduce(t.fill_(1))
print(comm.survivors, t[0].item())
"""


def test_two_die_where_memory_and_network_are_used():
    with namespaces.hosts(2) as made:
        job = Job(made, (0, 0, 1, 1), TWO_DEATHS, at(made), 30.0, transport="shm+tcp")
        outputs, problems = job.said(60.0)
    assert outputs == ["met\n", "met\n", *["met\n[2, 3] shm\n"] * 2], problems


def test_the_larger_part_of_a_cut_network_goes_on():
    with namespaces.hosts(3) as made:
        job = Job(made, (0, 1, 2), CUT, at(made), timeout=2.0)
        job.wait_until_met()
        time.sleep(0.3)
        made.cable(2, "down")
        outputs, problems = job.said(60.0)
    assert outputs[:2] == ["(0, 1) 2.0\n"] * 2, problems
    assert "of the 3 ranks that met in init()" in outputs[2], (outputs, problems)
