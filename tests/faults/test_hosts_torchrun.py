"""torch.distributed on two hosts: torchrun with an agent on each, and ranks that share a file."""

import json

import pytest

from . import hosts as namespaces
from .test_hosts import PORT

pytestmark = pytest.mark.skipif(bool(namespaces.why_not()), reason=namespaces.why_not() or "-")

RANKS = """
import json, torch, dpcore as dp
comm = dp.init(timeout=60)
t = torch.full((100_000,), comm.rank + 1.0)
comm.all_reduce(t)
words = [comm.rank, comm.transport, list(comm.hosts), t.unique().tolist()]
dp.finalize()
print(json.dumps(words) + "\\n", end="", flush=True)
"""


def under_torchrun(made, *program, environment=None):
    """What the agents of two hosts and their two ranks each print, a text per host."""
    agents = []
    for host in range(2):
        words = [
            *("--nnodes", "2", "--node-rank", str(host), "--nproc-per-node", "2"),
            *("--master-addr", made.address(0), "--master-port", str(PORT), *program),
        ]
        script = (
            f"import sys; sys.argv[1:] = {words!r}; from torch.distributed.run import main; main()"
        )
        agents.append(made.fork(host, script, {"OMP_NUM_THREADS": "1", **(environment or {})}))
    said = [agent.communicate(timeout=120) for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    return [output for output, _ in said]


@pytest.mark.patient
def test_ranks_use_memory_within_a_host_and_the_network_between(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    with namespaces.hosts(2) as made:
        outputs = under_torchrun(made, str(script))
    seen = sorted(json.loads(line) for output in outputs for line in output.splitlines())
    assert seen == [[rank, "shm+tcp", [0, 0, 1, 1], [10.0]] for rank in range(4)]


def test_the_network_between_hosts_is_calibrated(tmp_path):
    """Once per machine: both hosts are one here, so both agents write the same file."""
    with namespaces.hosts(2) as made:
        made.shape("100mbit", "32kb")
        outputs = under_torchrun(
            made,
            "-m",
            "dpcore",
            "calibrate",
            environment={"XDG_CACHE_HOME": str(tmp_path)},
        )
    step, message, byte = json.loads((tmp_path / "dpcore" / "costs.json").read_text())["network"]
    assert 0 < step < 0.1 and 0 <= message < 0.1
    assert 0.9 < byte * 100e6 / 8 < 1.5  # the link's, and a host is never faster
    assert "network" in "".join(outputs)


def said_by_ranks_with_a_file(path, environment):
    program = """
import datetime, warnings, torch, torch.distributed as dist, dpcore
warnings.simplefilter("ignore")
try:
    dist.init_process_group(
        "dpcore", init_method=file, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=30)
    )
    t = torch.ones(3)
    dist.all_reduce(t)
    print(t.tolist())
    dist.destroy_process_group()
except dpcore.RendezvousError as error:
    print(error)
"""
    with namespaces.hosts(2) as made:
        ranks = [
            made.fork(host, f"file, rank = 'file://{path}', {host}\n{program}", environment)
            for host in range(2)
        ]
        return [rank.communicate(timeout=60)[0].strip() for rank in ranks]


@pytest.mark.patient
def test_a_file_says_nothing_of_addresses(tmp_path):
    """Rank 0 finds its own: that of the card it is told, or the one its host's name leads to, which
    is often the loopback address, and each host has a loopback of its own."""
    card = {"DPCORE_SOCKET_IFNAME": "eth0"}
    assert said_by_ranks_with_a_file(tmp_path / "named", card) == ["[2.0, 2.0, 2.0]"] * 2
    local = {"MASTER_ADDR": "127.0.0.1"}
    for text in said_by_ranks_with_a_file(tmp_path / "local", local):
        assert "rank 0 found only the address 127.0.0.1 of its own: set" in text
