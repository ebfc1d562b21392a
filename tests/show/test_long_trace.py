"""A trace as long as people have them, in a real browser: 8 ranks, 200 steps, 100 buckets."""

import random

import pytest

from .browser import needs_browser
from .traces import page_of, write_trace

pytestmark = pytest.mark.alone

RANKS, STEPS, BUCKETS = 8, 200, 100
MOST_MS = 2000
TRIES = 8


@needs_browser
def test_it_opens_within_two_seconds(browser, tmp_path):
    """From the beginning of the navigation to the first frame, by the page's own clock. Times are
    random to the nanosecond, so that nothing is small because it repeats. It is opened again where
    it took longer: the machine may be busy with something else."""
    chance = random.Random(7)
    path = write_trace(
        tmp_path / "run.json", RANKS, STEPS, BUCKETS, jitter=lambda: chance.uniform(0, 0.05)
    )
    page = page_of(tmp_path, path)
    took_ms = []
    while not took_ms or (took_ms[-1] > MOST_MS and len(took_ms) < TRIES):
        took_ms.append(browser.open(page))
    assert took_ms[-1] <= MOST_MS, took_ms
    assert browser.run("page.timelines[0].steps.length") == STEPS
    lengths = browser.run("""page.timelines[0].run.lanes.filter((l) => l.kind === "operation")
      .map((l) => l.length)""")
    assert sum(lengths) == RANKS * STEPS * BUCKETS
    assert browser.problems == []
