"""Gradients in their buckets when something ends: a child is forked, the process exits, a rank
fails, a model goes, all while tensors lie in places of buckets."""

import subprocess
import sys

import pytest
import torch

import dpcore as dp
from tests.data_parallel.test_born_gradients import LAYERS, WIDTH, Wide, loss_of, weights


def run(code):
    done = subprocess.run([sys.executable, "-c", BEGIN + code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


# ``kept`` gets tensors that lie where gradients are expected: they hold open leases.
BEGIN = f"""
import os, sys
import torch
import dpcore as dp
from dpcore import _C

torch.set_num_threads(1)  # threads of OpenMP do not live on in a forked child
comm = dp.init(rank=0, world_size=1)
layers = [torch.nn.Linear({WIDTH}, {WIDTH}) for _ in range({LAYERS})]
model = dp.DataParallel(torch.nn.Sequential(*layers), comm=comm, gradients="born", bucket_cap_mb=2)
kept, act = [], lambda: None

def hook(*_):
    act()

layers[1].register_full_backward_hook(hook)

def step():
    model.zero_grad()
    model(torch.ones(2, {WIDTH})).sum().backward()

def take():
    kept.extend(torch.full(({WIDTH}, {WIDTH}), 7.0) for _ in range(2))

for _ in range(3):
    step()
assert model.bucket_report().gradients["born"] == {LAYERS}
"""


def test_a_fork_in_backward():
    run("""
def act():
    take()
    child = os.fork()
    if child == 0:
        fine = all((t == 7).all() for t in kept)
        for t in kept:
            t.fill_(8.0)
        kept.clear()
        os._exit(0 if fine else 1)
    assert os.waitpid(child, 0)[1] == 0

step()
assert model._reducer.copies()["moved"] > 0
assert all((t == 7).all() for t in kept)
""")


def test_an_exit_with_tensors_in_places():
    run("""
act = take
step()
sys.kept = kept  # until the interpreter has gone
""")


def test_an_exit_out_of_backward():
    run("""
def act():
    take()
    sys.kept = kept
    print("so far", flush=True)
    os.environ["LEFT"] = "1"
    raise SystemExit(0)

step()
""")


def test_after_finalize():
    run("""
act = take
step()
dp.finalize()
assert all((t == 7).all() for t in kept)
kept.clear()
assert model.module[0].weight.grad is not None
del model
torch.ones(2**22)
""")


def test_after_an_error_in_backward():
    run("""
def act():
    take()
    raise ValueError("of the program")

try:
    step()
except ValueError:
    pass
assert all((t == 7).all() for t in kept)
kept.clear()
del model
torch.ones(2**22)
""")


def test_a_model_that_goes_leaves_no_block_behind():
    run("""
model.zero_grad()
del model
import gc
gc.collect()
assert _C.warm_memory_figures()["kept"] == 0
""")


def test_a_rank_that_fails_in_backward():
    def body(comm):
        model = dp.DataParallel(Wide(), comm=comm, gradients="born", bucket_cap_mb=2)
        kept = []

        def fail(*_):
            kept.append(torch.full((WIDTH, WIDTH), 7.0))
            if step == 3 and comm.rank == 1:
                raise ValueError("of the program")

        step = 0
        model.module.layers[1].register_full_backward_hook(fail)
        for step in range(5):
            for p in weights(model):
                p.grad = None
            loss_of(model, comm, step).backward()
        assert all((t == 7).all() for t in kept)

    with pytest.raises((ValueError, dp.Error)):
        dp.spawn(body, 2, mode="threads", timeout=10)
