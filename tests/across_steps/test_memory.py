"""What a rank holds between two steps, as the kernel counts it: 16 bytes for each parameter under
`bucketed`, 8 + 8/N under `zero1`, 4 + 12/N under `zero2`, which has four whole buckets besides."""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import dpcore
from dpcore.tools.compare.training.held import give_back_at_once, proportional_bytes

MIB = 1 << 20
ROOT = Path(__file__).resolve().parents[2]
LAYERS = 24  # of a MiB each, which is a bucket
LENT = 4 * MIB
WHOLE = {"bucketed": 16, "zero1": 8, "zero2": 4}  # bytes of a parameter on every rank
CUT = {"bucketed": 0, "zero1": 8, "zero2": 12}  # bytes of which a rank has 1/N


def train(comm, schedule, layers):
    """Everything that is still held is returned."""
    module = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(layers)))
    model = dpcore.DataParallel(module, comm=comm, schedule=schedule, bucket_cap_mb=1)
    optimizer = torch.optim.AdamW(model.parameters())
    if schedule != "bucketed":
        optimizer = dpcore.DistributedOptimizer(optimizer, model)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 512)).square().mean().backward()
        optimizer.step()
    model.flush()
    comm.barrier()
    return model, optimizer


def held(comm):
    gc.collect()
    give_back_at_once()
    comm.barrier()  # all have, before anybody looks: what two map is half of each's
    seen = proportional_bytes()
    comm.barrier()
    return seen


def of_a_rank(comm, schedule):
    train(comm, schedule, 1)  # what is needed for the first model is there now
    before = held(comm)
    kept = train(comm, schedule, LAYERS)
    return held(comm) - before, kept[0].schedule


def held_by_ranks(world):
    """Under each schedule, the mean of the ranks."""
    found = {schedule: dpcore.spawn(of_a_rank, world, schedule) for schedule in WHOLE}
    return {name: sum(held for held, _ in ranks) / world for name, ranks in found.items()}


WORLDS = (2, 3) if os.environ.get("DPCORE_TEST_FULL") == "1" else (2,)


@pytest.mark.parametrize("world", WORLDS)
def test_a_rank_holds_what_the_page_says(world):
    """In a Python of its own. Forked ranks have pages in common with all other tests, which come
    and go, and what a page counts for depends on how many have it."""
    # conftest: what every rank would import is imported once
    program = f"import json, tests.conftest; from {__name__} import held_by_ranks; "
    program += f"print(json.dumps(held_by_ranks({world})))"
    out = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True
    )
    for schedule, seen in json.loads(out.stdout).items():
        expected = (WHOLE[schedule] + CUT[schedule] / world) * LAYERS * MIB / 4
        expected += LENT if schedule == "zero2" else 0
        assert seen == pytest.approx(expected, abs=3 * MIB), schedule
