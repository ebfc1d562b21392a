"""A rank that dies, stops or fails in the middle of backward, as the others see it."""

import os
import signal
import subprocess
import threading
import time

import pytest
import torch
from torch import nn

import dpcore
from dpcore.comm.launch.spawn import run_processes, run_threads
from tests.ranks import python

LAYERS = 4
SCHEDULES = ("bucketed", "sequential")


def layers():
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(LAYERS)))


def step(comm, model):
    model(torch.full((2, 16), float(comm.rank))).sum().backward()


def in_backward(comm, culprit, deed, schedule="bucketed"):
    """One step that works, and one in which the culprit does its deed in the middle of backward.
    Returns the seconds that it took until the error, the error, and that of the next step."""
    model = dpcore.DataParallel(layers(), comm=comm, bucket_cap_mb=0, schedule=schedule)
    step(comm, model)
    if comm.rank == culprit:
        model.module[1].weight.register_hook(lambda grad: deed())
    comm.barrier()
    begin = time.monotonic()
    problem = error_of(lambda: step(comm, model))
    seconds = time.monotonic() - begin
    return seconds, problem, error_of(lambda: step(comm, model))


def error_of(call):
    try:
        call()
    except dpcore.Error as error:
        return error
    return None


def kill_this_process():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.hurried
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("world", (2, 3))
def test_a_rank_that_is_killed_in_backward(schedule, world):
    def body(comm):
        return in_backward(comm, 1, kill_this_process, schedule)

    outcomes = run_processes(body, world, timeout=20)
    assert outcomes[1].exit_code == -signal.SIGKILL
    for survivor in (outcomes[0], *outcomes[2:]):
        assert survivor.error is None, survivor.traceback
        seconds, problem, again = survivor.result
        assert isinstance(problem, dpcore.PeerLost)
        assert "rank 1" in str(problem)
        # The culprit had sent the buckets of the last two layers.
        named = ("1.weight", "1.bias", "0.weight", "0.bias", "2.weight", "2.bias", "3.")
        assert str(problem).startswith("bucket ")
        assert any(name in str(problem) for name in named)
        assert isinstance(again, dpcore.Error)
        assert seconds < 10


@pytest.mark.hurried
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_rank_that_stops_in_backward(schedule):
    gave_up = threading.Event()

    def stay_away():
        gave_up.wait(60)

    def body(comm):
        try:
            return in_backward(comm, 1, stay_away, schedule)
        finally:
            gave_up.set()  # by the patient rank: the late one is in its wait until then

    patient, late = run_threads(body, 2, timeout=5.0)  # it is also the limit of the start
    seconds, problem, again = patient.result
    assert isinstance(problem, dpcore.Timeout)
    assert str(problem).startswith("bucket ")
    assert "rank 1" in str(problem)
    assert seconds > 4.9
    assert isinstance(again, dpcore.Timeout)
    # The late rank may find everything there that it needed; its next step fails at the latest.
    assert late.error is None, late.traceback
    assert isinstance(late.result[2], dpcore.Error)


@pytest.mark.hurried
@pytest.mark.parametrize("kind", (ValueError, SystemExit))
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_exception_of_the_user_in_backward_ends_the_others_wait(schedule, kind):
    def fail():
        raise kind("a hook of the user's")

    def body(comm):
        return in_backward(comm, 1, fail, schedule)

    waiting, failing = run_threads(body, 2, timeout=20)
    assert isinstance(failing.error, kind)
    seconds, problem, _ = waiting.result
    assert isinstance(problem, dpcore.PeerLost)
    assert f"{kind.__name__}: a hook of the user's" in str(problem)
    assert seconds < 10


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ctrl_c_at_the_end_of_backward(schedule, tmp_path):
    """The wait is within autograd, which passes on what the signal handler raises."""
    interrupted = tmp_path / "interrupted"

    def wait_for_it():
        """Longer than the other rank may take: it is not this rank that ends its wait."""
        deadline = time.monotonic() + 20
        while not interrupted.exists() and time.monotonic() < deadline:
            time.sleep(0.02)

    def body(comm):
        if comm.rank == 1:
            return in_backward(comm, 1, wait_for_it, schedule)[1:]
        begun = []

        def press_soon():
            begun.append(time.monotonic())
            threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGINT)).start()

        with pytest.raises(KeyboardInterrupt):
            in_backward(comm, 0, press_soon, schedule)
        seconds = time.monotonic() - begun[0]
        interrupted.touch()
        return seconds

    seconds, (problem, again) = dpcore.spawn(body, 2)
    assert seconds < 15
    assert "rank 0 was interrupted" in str(problem or again)


def test_after_a_failure_a_new_init_trains_again():
    def body(comm):
        with pytest.raises((ValueError, dpcore.Error)):
            model = dpcore.DataParallel(layers(), comm=comm)
            step(comm, model)
            if comm.rank == 1:
                comm.abort("enough")
                raise ValueError("enough")
            step(comm, model)
        dpcore.finalize()
        again = dpcore.init(
            rank=comm.rank, world_size=2, init_method="a second try", transport="inproc"
        )
        for parameter in model.parameters():
            parameter.grad = None
        model = dpcore.DataParallel(model.module, comm=again)
        for _ in range(2):
            model.zero_grad()
            step(again, model)
        return model.module[3].bias.grad.sum().item()

    assert dpcore.spawn(body, 2, mode="threads") == [32.0, 32.0]


def test_a_model_that_is_dropped_with_buckets_in_flight():
    """Their memory stays until the operations let go of it; the next model reuses nothing of it."""

    class Launches(dpcore.LaunchSchedule):
        def bucket_ready(self, control, bucket):
            control.launch(bucket)

        def optimizer_step(self, control):
            control.wait_for_all()

    def body(comm):
        for _ in range(3):
            model = dpcore.DataParallel(layers(), comm=comm, schedule=Launches())
            step(comm, model)
            del model
        model = dpcore.DataParallel(layers(), comm=comm)
        step(comm, model)
        return model.module[3].bias.grad.sum().item()

    assert dpcore.spawn(body, 2, mode="threads") == [32.0, 32.0]


SCRIPT = """
import sys, torch, dpcore
rank, job = int(sys.argv[1]), sys.argv[2]
comm = dpcore.init(rank=rank, world_size=2, init_method=job)
model = dpcore.DataParallel(torch.nn.Linear(4, 4))
model(torch.ones(1, 4)).sum().backward()
if rank == 1:
    raise RuntimeError("no more data on rank 1")
model(torch.ones(1, 4)).sum().backward()
"""


def test_an_uncaught_exception_is_told_to_the_waiting_ranks(tmp_path):
    """In a script, where nobody of ours catches it."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    processes = [
        python.start(script, rank, tmp_path, stderr=subprocess.PIPE, text=True) for rank in range(2)
    ]
    waiting, failing = (process.communicate(timeout=60)[1] for process in processes)
    assert "RuntimeError: no more data on rank 1" in failing
    assert "PeerLost: " in waiting
    assert "RuntimeError: no more data on rank 1" in waiting
    assert [process.returncode for process in processes] == [1, 1]
