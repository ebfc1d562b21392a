"""dpcore.trace over communicators for devices: what ran on the device, at the host's times."""

import json
import time
from functools import partial

import pytest
import torch

import dpcore
from dpcore.__main__ import main
from dpcore.tools.show.figures import figures_of
from dpcore.tools.show.reading import read_run
from dpcore.tools.show.schedules import DrawnSchedules
from tests.cuda_host import device_traces as bodies
from tests.ranks.devices import on_devices

pytestmark = pytest.mark.usefixtures("fake")

BACKENDS = ["nccl", "cuda"]


def settle():
    """Streams of torch are the caller here: what it has waited for is done."""


@pytest.mark.parametrize("backend", BACKENDS)
def test_operations_one_after_the_other(backend):
    body = partial(bodies.operations_one_after_the_other, device="cpu", settle=settle)
    on_devices(body, 2, backend=backend)


def test_the_oldest_are_dropped():
    on_devices(partial(bodies.the_oldest_are_dropped, device="cpu"), 2)


def test_groups_are_recorded_as_well():
    on_devices(partial(bodies.groups_are_recorded_as_well, device="cpu"), 2)


@pytest.mark.alone
@pytest.mark.parametrize("backend", BACKENDS)
def test_steps_and_their_file(tmp_path, backend, capsys):
    path = tmp_path / "run.json"
    body = partial(bodies.steps, device="cpu", settle=settle, path=path)
    on_devices(body, 2, backend=backend)
    content = json.loads(path.read_text())
    assert content["distributedInfo"]["backend"] == backend
    names = {
        entry["args"]["name"]
        for entry in content["traceEvents"]
        if entry["name"] == "thread_name" and entry["pid"] == 0
    }
    assert {"operations", "stream of cpu"} <= names
    figures = figures_of(read_run(path))
    assert figures.world_size == 2 and figures.steps == 3 and len(figures.ranks) == 2
    timed = [entry for entry in content["traceEvents"] if entry["ph"] == "X"]
    ends_at = max(entry["ts"] + entry["dur"] for entry in timed)
    assert 0 <= figures.exposed_ms <= (ends_at - min(entry["ts"] for entry in timed)) / 1e3
    assert 0 < figures.communication_ms_per_step <= 2 * figures.step_ms
    assert main(["show", str(path), "--html", str(tmp_path / "run.html")]) in (0, None)
    assert "exposed" in capsys.readouterr().out
    assert (tmp_path / "run.html").stat().st_size > 10_000


def what_ran(comm, path=None):
    """(path, root, world) of one operation after the other."""
    large, arena = torch.ones(300_000), comm.empty(300_000)
    arena.fill_(1.0)
    with dpcore.trace(path, comm=comm) as t:
        comm.all_reduce(torch.ones(100))
        comm.all_reduce(large)
        comm.all_reduce(arena)
        comm.broadcast(arena, 1)
        comm.broadcast(large, 1)
        comm.all_reduce(large, algorithm="ring/moves")
        comm.scatter(torch.ones(10), torch.ones(20) if comm.rank == 1 else None, 1)
        comm.barrier()
    found = bodies.of_kind(t, "operation")
    assert {e.path for e in t.events if e.kind != "operation"} == {""}
    return [(e.path, e.root, e.world) for e in found]


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        (
            "cuda",
            [
                ("one_shot/stage", -1, 2),
                ("two_shot/stage", -1, 2),
                ("two_shot/push", -1, 2),
                ("two_shot/push", 1, 2),
                ("direct/stage", 1, 2),
                ("ring/moves", -1, 2),
                ("direct/moves", 1, 2),
                ("barrier", -1, 2),
            ],
        ),
        (
            "nccl",
            [
                ("nccl", -1, 2),
                ("nccl", -1, 2),
                ("nccl", -1, 2),
                ("nccl", 1, 2),
                ("nccl", 1, 2),
                ("ring/moves", -1, 2),
                ("direct/nccl", 1, 2),
                ("barrier", -1, 2),
            ],
        ),
    ],
)
def test_each_operation_says_what_it_ran(tmp_path, backend, expected):
    path = tmp_path / "run.json"
    assert on_devices(what_ran, 2, path, backend=backend) == [expected] * 2
    run = read_run(path)
    drawn = DrawnSchedules([run])
    for event, (name, root, _) in zip(run.ranks[0].operations, expected, strict=True):
        algorithm = name.partition("/")[0]
        place = drawn.drawing_of(run, event)
        if algorithm in ("nccl", "barrier"):  # nobody knows its moves, or it has none
            assert place == ()
        else:
            shown = f"{algorithm}, root {root}" if root > 0 else algorithm
            assert place == ("2", event.name, shown, 2)
    (ring,) = (line for line in figures_of(run).operations if line.name == "all_reduce")
    assert ring.paths["ring/moves"] == 2


@pytest.mark.alone
def test_exposed_is_what_the_caller_waits_for():
    """A rank that comes late: the others stand still, and compute before is not exposed."""

    def body(comm):
        x = torch.ones(1000)
        comm.all_reduce(x)
        begin = time.perf_counter()
        with dpcore.trace(comm=comm) as t:
            work = comm.all_reduce(x, async_op=True)
            time.sleep(0.1)  # the other one sleeps as well, but before it comes
            work.wait()
            if comm.rank == 1:
                time.sleep(0.5)  # a busy machine leaves 150 ms of it
            comm.all_reduce(x)
        seconds = time.perf_counter() - begin
        return t.exposed_ms, t.communication_ms, seconds * 1e3

    (early, in_flight, whole), (late, *_) = on_devices(body, 2)
    assert 150 < early < whole - 90  # without the sleep of both
    assert in_flight >= 150
    assert late < early


def test_nothing_is_recorded_outside_of_the_block():
    def body(comm):
        x = torch.ones(10)
        with dpcore.trace(comm=comm) as first:
            comm.all_reduce(x)
        comm.all_reduce(x)
        with dpcore.trace(comm=comm) as second:
            comm.broadcast(x, 0)
        assert [e.name for e in bodies.of_kind(first, "operation")] == ["all_reduce"]
        assert [e.name for e in bodies.of_kind(second, "operation")] == ["broadcast"]

    on_devices(body, 2)


def test_a_failed_run_leaves_a_file_of_each_rank(fake, tmp_path):
    def body(comm):
        x = torch.ones(10)
        with dpcore.trace(tmp_path / "run.json", comm=comm):
            comm.all_reduce(x)
            fake.fake_nccl_fail(b"AllReduce", 4)
            comm.all_reduce(x)

    with pytest.raises(dpcore.Error):
        on_devices(body, 2)
    assert read_run(tmp_path / "run.rank0.json").error
