"""dpcore.trace on a GPU: the bodies of the device of the host, and the times of known work."""

import time
from functools import partial

import pytest
import torch

import dpcore
from dpcore.tools.show.figures import figures_of
from dpcore.tools.show.reading import read_run
from tests.cuda.on_gpu import settle
from tests.cuda.test_mapped import with_device
from tests.cuda_host import device_traces as bodies

PLACE = "cuda:0"


BODIES = [
    partial(bodies.operations_one_after_the_other, settle=settle),
    bodies.the_oldest_are_dropped,
    bodies.groups_are_recorded_as_well,
    partial(bodies.steps, settle=settle),
]


def on_this_gpu(comm, body):
    body(comm, comm.device)


@pytest.mark.parametrize("body", BODIES)
def test_over_nccl_in_a_world_of_one(comm, body):
    body(comm, PLACE)


@pytest.mark.parametrize("body", BODIES)
def test_two_ranks_over_mapped_memory(body):
    dpcore.spawn(with_device, 2, on_this_gpu, body, mode="threads", timeout=120.0)


def test_the_file_is_read_back(comm, tmp_path):
    path = tmp_path / "run.json"
    bodies.steps(comm, PLACE, torch.cuda.synchronize, path)
    figures = figures_of(read_run(path))
    assert figures.steps == 3 and 0 < figures.communication_ms_per_step <= figures.step_ms


def test_an_operation_begins_when_its_input_is_there(comm):
    """Behind a kernel that sleeps: not when the host asked for it."""
    x = torch.ones(1 << 20, device=PLACE)
    comm.all_reduce(x)
    torch.cuda.synchronize()
    with dpcore.trace(comm=comm) as t:
        asked = time.monotonic_ns()
        torch.cuda._sleep(200_000_000)  # about 0.1 s
        comm.all_reduce(x)
        back = time.monotonic_ns()
    (event,) = bodies.of_kind(t, "operation")
    assert back - asked < 50e6, "the call has waited for the GPU"
    assert event.begin_ns - asked > 50e6
    assert event.ms < 50
    assert t.exposed_ms <= event.ms + 0.1


def test_nothing_of_a_captured_graph(comm):
    x = torch.ones(1000, device=PLACE)
    comm.all_reduce(x)
    graph = torch.cuda.CUDAGraph()
    with dpcore.trace(comm=comm) as t:
        with torch.cuda.graph(graph):
            comm.all_reduce(x)
        graph.replay()
        comm.all_reduce(x)
    assert len(bodies.of_kind(t, "operation")) == 1
