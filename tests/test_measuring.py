"""docs/compatibility.md says which tool measures what: each cell of a host and of TCP runs here."""

import math
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dpcore as dp
from dpcore.recorder.step_figures import line_of
from tests.ranks.groups import in_group
from tests.ranks.mpi import SAY, each_mpi, mpirun, needs_mpi
from tools import measuring


class Late(dp.LaunchSchedule):
    """One of a user's own."""

    def backward_end(self, control):
        for bucket in range(control.buckets):
            control.launch(bucket)
        control.wait_for_all()


def trained(comm, name):
    """A model, its optimizer, and the block around its steps."""
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    if name == "local_sgd":
        return module, optimizer, dp.LocalSGD(module, optimizer, 2, comm=comm)
    if name == "diloco":
        outer = torch.optim.SGD(module.parameters(), lr=0.7)
        return module, optimizer, dp.DiLoCo(module, optimizer, outer, 2, comm=comm)
    if name == "torch":
        return nn.parallel.DistributedDataParallel(module), optimizer, warnings.catch_warnings()
    schedule = Late() if name == "own" else name
    model = dp.DataParallel(module, comm=comm, schedule=schedule)
    if model._across is not None:
        optimizer = dp.DistributedOptimizer(optimizer, model)
    return model, optimizer, warnings.catch_warnings()


def works(tool, comm, name):
    """Whether the tool has measured some steps of this schedule."""
    model, optimizer, block = trained(comm, name)
    watched = block if name in ("local_sgd", "diloco") else model
    generator = torch.Generator().manual_seed(0 if comm is None else comm.rank)

    def backward():
        x = torch.randn(4, 6, generator=generator)
        model(x).square().mean().backward()

    def step():
        backward()
        optimizer.step()

    def train(steps=4):
        for _ in range(steps):
            optimizer.zero_grad()
            step()

    if tool == "measure_overlap":
        measured = dp.measure_overlap(watched, step if watched is block else backward, steps=7)
        return measured.communication_ms > 0
    with block:
        if tool == "trace and show":
            with dp.trace(comm=comm) as seen:
                train()
            return seen.communication_ms > 0
        if tool == "monitor":
            with dp.monitor(watched, 3, to=None) as monitor:
                train(6)
            return monitor.last["communication_ms"] > 0 and "overlap" in line_of(monitor.last)
        if tool == "noise scale":
            warnings.simplefilter("ignore")  # says why not
            with dp.gradient_noise_scale(watched, every=1) as scale:
                train()
            return not math.isnan(scale.value)
    raise AssertionError(tool)


def cells(comm, tools, schedules):
    found = {}
    for tool in tools:
        for name in schedules:
            try:
                found[tool, name] = works(tool, comm, name)
            except (TypeError, dp.Unsupported):
                found[tool, name] = False
    return found


TOOLS = ("trace and show", "monitor", "noise scale", "measure_overlap")
NAMES = [name for names in measuring.SCHEDULES.values() for name in names if name != "torch"]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_cells_of_a_host_and_of_tcp(transport):
    """`compare` runs under all of them in tests/compare, OverlapMonitor in tests/test_lightning.py,
    and tests/simulate and tests/advise read what trace writes."""
    for found in dp.spawn(cells, 2, TOOLS, NAMES, transport=transport):
        assert [cell for cell, it_works in found.items() if not it_works] == []


def test_cells_of_a_group_of_torch():
    names = measuring.SCHEDULES["within a step"]

    def body():
        group = dp.TorchCommunicator(dist.group.WORLD)
        return cells(group, TOOLS, names)

    wanted = {
        (tool, name): (tool, "group of torch") not in measuring.OF_PLACES
        for tool in TOOLS
        for name in names
    }
    assert in_group(body, 2, backend="gloo") == [wanted] * 2


OVER_MPI = """
import torch, dpcore
from tests.test_measuring import TOOLS, cells

torch.set_num_threads(1)
comm = dpcore.init(backend="mpi")
found = cells(comm, TOOLS, ["bucketed", "sequential"])
say(comm.rank, sorted(cell for cell, it_works in found.items() if not it_works))
dpcore.finalize()
"""


@needs_mpi
@each_mpi
def test_cells_of_a_group_of_mpi(tmp_path, launcher):
    run, said = mpirun(tmp_path, SAY + OVER_MPI, launcher)
    assert run.returncode == 0, run.stdout + run.stderr
    assert said == ["[]"] * 2
    refused = [tool for tool, place in measuring.OF_PLACES if place == "group of MPI"]
    assert refused == ["compare"]


def test_cells_of_torch_ddp():
    """Over Gloo, whose ranks are processes; dp.trace records torch's group in tests/advise."""

    def body():
        return cells(None, TOOLS[1:], ["torch"])

    for found in in_group(body, 2, backend="gloo"):
        assert [cell for cell, it_works in found.items() if not it_works] == []


def test_what_is_no_model_of_theirs_is_refused():
    for measures in (
        dp.monitor,
        dp.gradient_noise_scale,
        lambda model: dp.measure_overlap(model, lambda: None),
    ):
        with pytest.raises(TypeError, match=r"dpcore\.DataParallel.*DistributedDataParallel"):
            measures(nn.Linear(1, 1))


def test_exceptions_are_at_most_ten_facts():
    reasons = {*measuring.OF_PLACES.values()}
    assert len(reasons) <= 10 and len(measuring.OF_PLACES) <= 10
    assert not [reason for reason in reasons if "not supported" in reason]
