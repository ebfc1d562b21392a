"""Runs under each other on one page: the same step of each, and no rows in which nothing is."""

import itertools

import pytest

from dpcore.tools.show import read_run, write_page, write_picture
from dpcore.tools.show.reading import read_runs

from .browser import needs_browser
from .profiles import GLOO
from .traces import page_of, write_trace

pytestmark = needs_browser

STEPS = "page.timelines.map((t) => t.step)"
# Rows of the drawn layout in which nothing lies in view, but for the one that each kind keeps.
EMPTY = """page.timelines.flatMap((t) => {
  const { begin, end } = t.scale, kinds = new Map();
  for (const band of t.layout.bands) {
    const key = `${band.rank} ${band.kind}`;
    kinds.set(key, [...(kinds.get(key) || []), band.lane.isBusy(begin, end)]);
  }
  const isEmpty = ([, busy]) => busy.length > 1 && busy.includes(false);
  return [...kinds].filter(isEmpty).map(([key]) => key);
})"""
ROWS = "page.timelines[0].layout.bands.filter((b) => b.kind === 'bucket' && b.rank === 0).length"


def one_crowded_step():
    """In the second step of three, every bucket is on its way until the end of the step."""
    calls = itertools.count()

    def later():
        call = next(calls)
        step, is_end = call // 8 % 3, call % 2
        return 10.0 if step == 1 and is_end else -3.9 * is_end

    return later


def test_runs_are_at_the_same_step(browser, tmp_path):
    short = write_trace(tmp_path / "short.json", steps=2)
    long = write_trace(tmp_path / "long.json", steps=5)
    browser.open(page_of(tmp_path, short, long))
    first, second = browser.run(STEPS)
    assert first == second
    browser.run("page.goToStep(0)")
    seen = [browser.run(f"(page.otherStep(1), {STEPS})") for _ in range(5)]
    assert seen == [[1, 1], [1, 2], [1, 3], [1, 4], [1, 4]]
    assert browser.text("#step") == "5 of 5"
    back = [browser.run(f"(page.otherStep(-1), {STEPS})") for _ in range(4)]
    assert back == [[1, 3], [1, 2], [1, 1], [0, 0]]
    assert not browser.problems


def test_no_row_is_empty(browser, tmp_path):
    path = write_trace(tmp_path / "run.json", buckets=4, jitter=one_crowded_step())
    browser.open(page_of(tmp_path, path))
    rows = []
    for step in range(3):
        browser.run(f"(page.goToStep({step}), page.oneStep())")
        assert browser.run(EMPTY) == []
        rows.append(browser.run(ROWS))
    assert rows[0] < rows[1] > rows[2]
    browser.run("page.everything()")
    assert browser.run(ROWS) == rows[1]
    assert not browser.problems


def test_rows_stay_while_somebody_drags_and_come_when_they_are_needed(browser, tmp_path):
    path = write_trace(tmp_path / "run.json", buckets=4, jitter=one_crowded_step())
    browser.open(page_of(tmp_path, path))
    browser.run("(page.goToStep(0), page.oneStep())")
    few = browser.run(ROWS)
    many = browser.run(f"(page.pan(1), {ROWS})")
    assert many > few
    assert browser.run(f"(page.pan(-1), {ROWS})") == many
    assert browser.run(f"(page.oneStep(), {ROWS})") == few


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_ranks_of_torch_ddp_on_a_page(browser, tmp_path, scheme):
    page = tmp_path / "page.html"
    write_page(page, read_runs(GLOO))
    browser.colours(scheme)
    for width, phone in ((1280, False), (390, True)):
        browser.size(width, 900, phone=phone)
        browser.open(page)
        assert browser.run(EMPTY) == []
        assert browser.run("document.documentElement.scrollWidth <= window.innerWidth")
        assert "2 ranks over gloo" in browser.text("#headlines")
    browser.size(1280, 900)
    browser.colours("light")
    assert not browser.problems


def test_a_picture_has_the_same_step_of_each_run(tmp_path):
    short = read_run(write_trace(tmp_path / "short.json", steps=2))
    long = read_run(write_trace(tmp_path / "long.json", steps=5))
    write_picture(tmp_path / "both.png", [long, short])
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
