"""What `dpcore show` tells of a run whose buckets have several legs."""

import json
import re

import pytest

import dpcore
from dpcore.show import read_run, write_page
from dpcore.show.buckets import bucket_spans
from tests.across_steps.programs import CASES
from tests.across_steps.sides import Wrapped

LEGS = {
    "bucketed": {""},
    "priority": {""},
    "dear": {"reduce_scatter", "all_gather"},
    "zero1": {"reduce_scatter", "all_gather"},
}


@pytest.mark.parametrize("schedule", LEGS)
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
        assert {span.leg for span in bucket_spans(run, rank)} == LEGS[schedule]
        names = {event.name for event in rank.compute}
        assert ("update" in names) == (schedule != "bucketed")
    write_page(page, [run])
    shown = re.search(r'id="data"[^>]*>(.*?)</script>', page.read_text(), re.DOTALL)
    labels = json.loads(shown[1])["runs"][0]["labels"]
    assert {label["leg"] for label in labels if "leg" in label} == LEGS[schedule] - {""}
