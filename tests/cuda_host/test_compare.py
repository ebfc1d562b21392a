"""`dpcore compare --device cuda` on devices of the host, with stand-ins for torch's events and its
allocator; and what is said where there is no GPU."""

import argparse
import re
import threading
import time

import pytest
import torch

from dpcore.__main__ import main
from dpcore.tools.compare import devices
from dpcore.tools.compare.arguments import add_arguments
from dpcore.tools.compare.command import plan_of
from dpcore.tools.compare.training import worker
from dpcore.tools.compare.training.clock import DeviceClock
from dpcore.tools.compare.training.worker import Job
from tests.ranks.devices import on_devices

MIB = 1 << 20
HELD, PEAK = 100 * MIB, 107 * MIB
MODEL = """
import torch

def make(rank, world):
    model = torch.nn.Sequential(torch.nn.Linear(8, 512), torch.nn.ReLU(), torch.nn.Linear(512, 1))
    x = torch.randn(4, 8)

    def step(model):
        assert torch.is_autocast_enabled("cpu")
        return model(x).square().mean()

    return model, step
"""
CONTENDERS = ["dpcore bucketed", "local_sgd:2", "alone", "all_reduce dpcore"]


class Event:
    """Can be read after the device has been waited for, and not before."""

    settled = threading.local()

    def __init__(self, enable_timing=False):
        assert enable_timing
        self.at = 0.0

    def record(self):
        self.at = time.perf_counter()
        Event.settled.at = 0.0

    def elapsed_time(self, end):
        assert Event.settled.at >= end.at > 0
        return (end.at - self.at) * 1e3


@pytest.fixture
def cuda(monkeypatch):
    """Torch's clock and allocator of a GPU."""

    def synchronize(device):
        Event.settled.at = time.perf_counter()

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: HELD)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: PEAK)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)


@pytest.mark.usefixtures("fake", "cuda")
@pytest.mark.parametrize("backend", ["nccl", "cuda"])
def test_steps_are_timed_by_events_and_memory_is_counted(tmp_path, monkeypatch, backend):
    (tmp_path / "own.py").write_text(MODEL)
    monkeypatch.setattr(worker, "everybodys", lambda mine: {n: [v] for n, v in mine.items()})
    lines = []
    monkeypatch.setattr(worker, "report", lambda comm, line: lines.append(line))
    job = Job(
        f"{tmp_path / 'own.py'}:make", CONTENDERS, rounds=2, steps=4, folder="", by_round=True,
        optimizer="adamw", amp=True,
    )  # fmt: skip

    def body(comm):
        return worker.measured(job, comm, DeviceClock(torch.device("cpu")))

    results = on_devices(body, 2, backend=backend)
    for result in results:
        for name in CONTENDERS:
            (seconds,) = result["seconds"][name]
            assert len(seconds) == 8
            assert min(seconds) > 0
        # A step of dpcore's buckets is copied into memory that torch has not allocated.
        of_buckets = sum(result["choices"]["dpcore bucketed"][0]["bucket_bytes"])
        counted = [PEAK - HELD + (of_buckets if backend == "cuda" else 0), PEAK - HELD]
        assert [result["memory"][name][0][0] for name in CONTENDERS[:2]] == counted
    of_round = [line for line in lines if "round" in line]
    assert {line["round"] for line in of_round} == {0, 1}
    assert all(min(line["tails"]["dpcore bucketed"][0]) > 0 for line in of_round)


def planned(*given):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return plan_of(parser.parse_args(["mlp", *given]))


@pytest.mark.parametrize(
    ("gpus", "given", "kind", "world"),
    [
        (1, [], "gpus", 1),
        (1, ["--world", "2"], "shared", 2),
        (4, [], "gpus", 4),
        (4, ["--world", "8"], "shared", 8),
    ],
)
def test_ranks_have_a_gpu_each_where_there_are_enough(monkeypatch, gpus, given, kind, world):
    monkeypatch.setattr(devices, "why_no_gpu", lambda: "")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    plan = planned("--device", "cuda", "--amp", *given)
    (cell,) = plan.cells
    assert (cell.kind, cell.world) == (kind, world)
    assert (plan.device, plan.amp) == ("cuda", True)
    assert ("NCCL" in cell.title) == (kind == "gpus")
    note = devices.note_on(kind, world)
    assert ("sends nothing" in note) == (world == 1)
    assert ("take turns" in note) == (kind == "shared")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "--device cuda: .*(built without CUDA|sees no GPU)"),
        (["--link", "1gbit"], "--device cuda: "),
        (["--world", "1"], "--device cuda: "),
    ],
)
def test_without_a_gpu_one_line_says_why(monkeypatch, capsys, given, said):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["compare", "mlp", "--device", "cuda", *given]) == 2
    complaint = capsys.readouterr().err
    assert len(complaint.splitlines()) == 1
    assert re.search(said, complaint)


def test_links_are_for_ranks_on_the_cpu(monkeypatch, capsys):
    monkeypatch.setattr(devices, "why_no_gpu", lambda: "")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert main(["compare", "mlp", "--device", "cuda", "--link", "1gbit"]) == 2
    assert "what connects the GPUs" in capsys.readouterr().err
