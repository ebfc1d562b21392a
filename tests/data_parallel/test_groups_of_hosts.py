"""A script for Gloo on several hosts that changes one import: gradients go over dpcore there, too,
where its hosts reach each other."""

import json
import os

import pytest
import torch.distributed as dist

import dpcore
from dpcore.ddp.wrapper import gradient_group
from tests.data_parallel.models import OPTIMIZERS, assert_same_values, train_alone
from tests.data_parallel.test_groups import (
    over_gloo,
    train_as_torch_scripts_do,
    trained_in_subgroups,
)
from tests.faults.hosts import hosts, why_not


def trained():
    model = train_as_torch_scripts_do(dpcore.DataParallel, bucket_cap_mb=0.01)
    assert_same_values(model.module, train_alone(OPTIMIZERS["momentum"], steps=4))
    return model.backend, getattr(model.group, "transport", "")


@pytest.mark.parametrize(("world", "names"), [(2, "a,b"), (3, "a,a,b")])
def test_gradients_go_over_tcp_between_hosts(monkeypatch, world, names):
    monkeypatch.setenv("DPCORE_PRETEND_HOSTS", names)
    transport = "tcp" if world == 2 else "shm+tcp"
    assert over_gloo(trained, world) == [("native", transport)] * world


def test_a_group_of_some_ranks(monkeypatch):
    monkeypatch.setenv("DPCORE_PRETEND_HOSTS", "a,b")  # by the rank in the group
    found = over_gloo(trained_in_subgroups, 3)
    assert found == [("native", "tcp"), ("native", "shm"), ("native", "tcp")]


def test_where_one_rank_cannot_all_stay_with_gloo(monkeypatch):
    """And they hear why."""
    monkeypatch.setenv("DPCORE_PRETEND_HOSTS", "a,b")

    def body():
        gradient_group._MEETING_SECONDS = 1.0
        if dist.get_rank() == 1:
            os.environ["DPCORE_SOCKET_IFNAME"] = "nonesuch0"
        with pytest.warns(RuntimeWarning, match="gradients travel over gloo, which is slower") as w:
            backend, _ = trained()
        return backend, str(w[0].message)

    (first, _), (second, why) = over_gloo(body, 2)
    assert first == second == "torch gloo"
    assert "nonesuch0" in why


SCRIPT = """
import json, os, torch, torch.distributed as dist
from dpcore import DistributedDataParallel
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method=os.environ["WHERE"], rank=rank, world_size=world)
model = DistributedDataParallel(torch.nn.Linear(2, 1))
model(torch.full((1, 2), 1.0 + dist.get_rank())).sum().backward()
print(json.dumps([model.backend, model.group.transport, model.module.weight.grad.tolist()]))
dist.destroy_process_group()
"""


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "namespaces can be made")
@pytest.mark.parametrize("where", ["env://", "tcp://10.77.0.1:29500"])
def test_between_two_hosts(where):
    with hosts(2) as made:
        told = {"MASTER_ADDR": made.address(0), "MASTER_PORT": "29500"}
        if where != "env://":
            assert where.startswith(f"tcp://{made.address(0)}:")
            told = {}
        told |= {"GLOO_SOCKET_IFNAME": "eth0", "DPCORE_SECRET": "between two hosts"}
        told |= {"WORLD_SIZE": "2", "WHERE": where}
        started = [made.fork(rank, SCRIPT, {"RANK": str(rank), **told}) for rank in range(2)]
        for process in started:
            out, err = process.communicate(timeout=60)
            assert process.returncode == 0, err
            assert json.loads(out) == ["native", "tcp", [[1.5, 1.5]]]
