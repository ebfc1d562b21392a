"""What `dpcore show` tells of a run whose buckets have several phases."""

import json
import re

import pytest
import torch

import dpcore
from dpcore.tools.show import read_run, write_page
from dpcore.tools.show.buckets import bucket_spans
from dpcore.tools.show.rows import rows_of
from tests.across_steps.programs import CASES
from tests.across_steps.sides import Wrapped

PHASES = {
    "bucketed": {""},
    "priority": {""},
    "dear": {"reduce_scatter", "all_gather"},
    "zero1": {"reduce_scatter", "all_gather"},
}


@pytest.mark.parametrize("schedule", PHASES)
def test_legs_are_told_apart(tmp_path, schedule):
    path, page = tmp_path / "run.json", tmp_path / "run.html"

    def body(comm):
        side = Wrapped(comm, CASES["plain"], "sgd", schedule)
        CASES["plain"].program(side)
        with dpcore.trace(str(path), comm=comm):
            CASES["plain"].program(side)
            side.weights()

    dpcore.spawn(body, 2, mode="threads", timeout=20)
    run = read_run(path)
    for rank in run.ranks:
        assert {span.phase for span in bucket_spans(run, rank)} == PHASES[schedule]
        names = {event.name for event in rank.compute}
        assert ("update" in names) == (schedule != "bucketed")
    write_page(page, [run])
    shown = re.search(r'id="data"[^>]*>(.*?)</script>', page.read_text(), re.DOTALL)
    labels = json.loads(shown[1])["runs"][0]["labels"]
    assert {label["phase"] for label in labels if "phase" in label} == PHASES[schedule] - {""}


# MiB of buckets that nobody gave a size, in the order in which they are sent, and the last repeats.
CAPS = {
    "bucketed": [1, 25],
    "per_parameter": [0],
    "flat": [""],
    "priority": [1],
    "dear": [1],
    "zero1": [1],
}


@pytest.mark.parametrize("schedule", CAPS)
def test_the_table_has_the_cap_that_buckets_were_cut_by(tmp_path, schedule):
    """Four layers of 1 MiB each, over a ring: so no other caps are chosen after the first step."""
    path = tmp_path / "run.json"

    def body(comm):
        layers = [torch.nn.Linear(512, 512, bias=False) for _ in range(4)]
        model = dpcore.DataParallel(torch.nn.Sequential(*layers), comm=comm, schedule=schedule)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        if schedule in ("priority", "dear", "zero1"):
            optimizer = dpcore.DistributedOptimizer(optimizer, model)
        with dpcore.trace(path, comm=comm):
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.ones(1, 512)).sum().backward()
                optimizer.step()
            model.flush()
        return [bucket.bytes >> 20 for bucket in model.bucket_report()]

    buckets, _ = dpcore.spawn(body, 2, mode="threads", algorithm="ring", timeout=20)
    assert buckets == {"bucketed": [1, 3], "flat": [4]}.get(schedule, [1, 1, 1, 1])
    of_bucket = {row["bucket"]: row["cap_mb"] for row in rows_of(read_run(path))}
    caps = CAPS[schedule]
    assert of_bucket == {n: caps[min(n, len(caps) - 1)] for n in range(len(buckets))}
