"""Ranks of several hosts that use memory where they share a host, and find that out by themselves.

The hosts are network namespaces (hosts.py): their abstract Unix sockets are as separate as those
of machines.
"""

import json
import time

import pytest

from . import hosts as namespaces
from .test_hosts import FOREVER, PORT, Job, at

pytestmark = pytest.mark.skipif(bool(namespaces.why_not()), reason=namespaces.why_not() or "-")

# What a host sends is counted by its interface: headers, acknowledgements and all.
MEASURE = """
import json
from pathlib import Path
S, ROUNDS = 2 << 20, 3
counter = Path("/sys/class/net/eth0/statistics/tx_bytes")
t = torch.full((S // 4,), comm.rank + 1.0)
comm.all_reduce(t, op="mean")
def sent(algorithm):
    comm.barrier()
    before = int(counter.read_text())
    comm.barrier()
    for _ in range(ROUNDS):
        comm.all_reduce(t, op="mean", algorithm=algorithm)
    comm.barrier()
    return (int(counter.read_text()) - before) / ROUNDS / S
shares = [sent(name) for name in ("auto", "hierarchical", "two_shot")]
print(json.dumps([comm.transport, comm.hosts, t.unique().tolist(), shares]))
"""


def variables(made):
    """What somebody who starts ranks by hand exports; nobody has calibrated here."""
    return {
        "MASTER_ADDR": made.address(0),
        "MASTER_PORT": str(PORT),
        "XDG_CACHE_HOME": "/nonexistent",
    }


@pytest.mark.patient
@pytest.mark.parametrize(
    ("places", "transport", "shares"),
    [
        ((0, 0, 1, 1), "shm+tcp", (1, 1, 2)),
        ((0, 1, 1, 1), "shm+tcp", (1.5, 1, 1.5)),  # a third less is not worth other bits
        ((0, 1, 2), "tcp", (4 / 3, 4 / 3, 4 / 3)),
    ],
    ids=str,
)
def test_plain_variables_are_enough(places, transport, shares):
    """An all-reduce of S sends about S out of each of two hosts, however many ranks they have."""
    with namespaces.hosts(max(places) + 1) as made:
        job = Job(made, places, MEASURE, None, 30.0, variables(made), transport="auto")
        outputs, problems = job.said(90.0)
    for output in outputs:
        assert output.startswith("met\n["), problems
        found = json.loads(output.removeprefix("met\n"))
        assert found[:3] == [transport, list(places), [(len(places) + 1) / 2]]
        for share, expected in zip(found[3], shares, strict=True):
            assert expected <= share < expected * 1.1 + 0.02


@pytest.mark.parametrize("victim", [1, 2])
def test_a_death_is_named_by_local_peers_and_by_the_other_host(victim):
    with namespaces.hosts(2) as made:
        job = Job(made, (0, 0, 1, 1), FOREVER, None, 20.0, variables(made), transport="auto")
        job.wait_until_met()
        time.sleep(0.5)
        job.ranks[victim].kill()
        killed_at = time.monotonic()
        outputs, problems = job.said(60.0)
    for rank in {0, 1, 2, 3} - {victim}:
        assert outputs[rank].startswith(f"PeerLost rank {rank}: rank {victim} (process "), problems
        assert float(outputs[rank].split()[-1]) - killed_at < 5


def test_the_plug_between_hosts_is_pulled():
    """Local peers go on seeing each other; the deadline names a rank of the other host."""
    with namespaces.hosts(2) as made:
        job = Job(made, (0, 0, 1, 1), FOREVER, at(made), 2.0, variables(made), transport="shm+tcp")
        job.wait_until_met()
        time.sleep(0.5)
        made.cable(1, "down")
        outputs, problems = job.said(60.0)
    for rank, output in enumerate(outputs):
        assert output.startswith(("Timeout rank ", "PeerLost rank ")), problems
        others = (2, 3) if rank < 2 else (0, 1)
        assert any(f"rank {other} " in output for other in others), output
