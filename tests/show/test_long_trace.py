"""A trace as long as people have them, in a real browser: 8 ranks, 200 steps, 100 buckets."""

import gc
import random

import pytest

from .browser import needs_browser
from .traces import page_of, write_trace

RANKS, STEPS, BUCKETS = 8, 200, 100
MOST_MS = 2000
TRIES = 8


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Times are random to the nanosecond, so that nothing is small because it repeats."""
    chance = random.Random(7)
    folder = tmp_path_factory.mktemp("long")
    gc.disable()  # it would look through a million events again and again
    try:
        path = write_trace(
            folder / "run.json", RANKS, STEPS, BUCKETS, jitter=lambda: chance.uniform(0, 0.05)
        )
        return page_of(folder, path)
    finally:
        gc.enable()


def test_its_page_takes_some_bytes_for_each_operation(page):
    assert page.stat().st_size < 40 * RANKS * STEPS * BUCKETS


@needs_browser
@pytest.mark.hurried
def test_it_opens_within_two_seconds(browser, page):
    """From the beginning of the navigation to the first frame, by the page's own clock, or by the
    processor time that the browser used, since it may share processors with other tests. It is
    opened again where both took longer: the first page also starts processes of the browser."""
    took_ms = []
    while not took_ms or (min(took_ms[-1]) > MOST_MS and len(took_ms) < TRIES):
        before = browser.processor_ms()
        by_its_clock = browser.open(page)
        after = browser.processor_ms()
        took_ms.append((by_its_clock, sum(after[of] - before.get(of, 0) for of in after)))
    assert min(took_ms[-1]) <= MOST_MS, took_ms
    assert browser.run("page.timelines[0].steps.length") == STEPS
    lengths = browser.run("""page.timelines[0].run.lanes.filter((l) => l.kind === "operation")
      .map((l) => l.length)""")
    assert sum(lengths) == RANKS * STEPS * BUCKETS
    assert browser.problems == []
