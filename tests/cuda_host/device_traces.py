"""What dpcore.trace says of a device, as bodies for a rank: on devices of the host
(test_device_trace.py) and on GPUs (tests/cuda)."""

import time
from itertools import pairwise

import torch

import dpcore
from dpcore.recorder.file import DEVICE_TRACK
from tests.cuda_host.gradient_copies import CAP_MB, WIDTH, inputs_of, layers

SLACK_NS = 5_000_000  # of the device's zero on the host's clock, on a machine that is busy


def of_kind(t, kind, name=None):
    return [e for e in t.events if e.kind == kind and (name is None or e.name == name)]


def operations_one_after_the_other(comm, device, settle):
    """As launched, within the time that the host saw, and with what was asked for. ``settle``:
    waits for the device."""
    x, y = (torch.ones(n, device=device) for n in (1000, 3000))
    comm.all_reduce(x)
    comm.broadcast(y, 0)
    settle()
    begin = time.monotonic_ns()
    with dpcore.trace(comm=comm) as t:
        for _ in range(5):
            comm.all_reduce(x, "mean")
            comm.broadcast(y, 0)
        settle()
    end = time.monotonic_ns()
    found = of_kind(t, "operation")
    assert [e.name for e in found] == ["all_reduce", "broadcast"] * 5
    assert [e.bytes for e in found] == [4000, 12000] * 5
    numbers = [e.operation for e in found]
    assert numbers == list(range(numbers[0], numbers[0] + 10))
    for event in found:
        assert begin - SLACK_NS <= event.begin_ns <= event.end_ns <= end + SLACK_NS
    for event, following in pairwise(found):
        assert event.end_ns <= following.begin_ns, "one stream runs one after the other"
    assert t.dropped == 0
    assert t.communication_ms <= (end - begin + 2 * SLACK_NS) * 1e-6
    assert t.by_operation()["all_reduce"]["count"] == 5


def the_oldest_are_dropped(comm, device):
    x = torch.ones(10, device=device)
    with dpcore.trace(comm=comm, capacity=4) as t:
        for _ in range(10):
            comm.all_reduce(x)
    found = of_kind(t, "operation")
    assert len(found) == 4 and t.dropped >= 6
    last = found[-1].operation
    assert [e.operation for e in found] == list(range(last - 3, last + 1))


def groups_are_recorded_as_well(comm, device):
    part = comm.split(0, comm.rank)
    x = torch.ones(10, device=device)
    with dpcore.trace(comm=comm) as t:
        part.all_reduce(x)
        comm.all_reduce(x)
    assert len(of_kind(t, "operation", "all_reduce")) == 2
    part.close()


def steps(comm, device, settle, path=None):
    """Of training: forward, backward, gradients, launches, operations, in an order that can be."""
    module = layers().to(device)
    model = dpcore.DataParallel(module, comm=comm, bucket_cap_mb=CAP_MB)

    def step(number):
        model.zero_grad()
        model(inputs_of(number, comm.rank).to(device)).square().sum().backward()

    for number in range(2):
        step(number)
    settle()
    begin = time.monotonic_ns()
    with dpcore.trace(path, comm=comm) as t:
        for number in range(3):
            step(number)
        settle()
    end = time.monotonic_ns()
    buckets = len(model.bucket_report())
    forwards, backwards = (of_kind(t, "compute", name) for name in ("forward", "backward"))
    assert len(forwards) == len(backwards) == 3
    assert {e.thread for e in (*forwards, *backwards)} == {DEVICE_TRACK}
    assert len(of_kind(t, "ready")) == 3 * len(list(module.parameters()))
    launches, reduces = of_kind(t, "launch"), of_kind(t, "operation", "all_reduce")
    assert len(launches) == len(reduces) == 3 * buckets
    for event in t.events:
        assert begin - SLACK_NS <= event.begin_ns <= event.end_ns <= end + SLACK_NS
    for forward, backward in zip(forwards, backwards, strict=True):
        assert forward.begin_ns <= forward.end_ns <= backward.begin_ns <= backward.end_ns
    for launch, reduce in zip(launches, reduces, strict=True):
        assert launch.begin_ns <= reduce.begin_ns, "a bucket left before its gradients were there"
    assert 0 <= t.exposed_ms <= (end - begin) * 1e-6
    return t.path, WIDTH
