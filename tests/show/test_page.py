"""The page of dpcore show in a real browser: it draws, it answers, its numbers are the trace's."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest

import dpcore as dp
from dpcore.tools.show import figures_of, read_run
from dpcore.tools.show.page import page_text

from .browser import needs_browser
from .traces import MS, page_of, write_trace


def lane_totals(browser, kind):
    """Milliseconds that the lanes of a kind cover, by rank, as the page has them."""
    script = f"""
      Object.fromEntries(page.timelines[0].run.lanes.filter((lane) => lane.kind === "{kind}")
        .map((lane) => [lane.rank, lane.covered[lane.length] / 1e6]))"""
    return {int(rank): value for rank, value in browser.run(script).items()}


@needs_browser
def test_the_page_draws_and_shows_the_numbers_of_the_trace(browser, tmp_path):
    path = write_trace(tmp_path / "run.json", late=1.0)
    browser.size(1280, 900)
    browser.open(page_of(tmp_path, path))
    figures = figures_of(read_run(path))
    heading = browser.text("h1")
    assert heading == "exposed 3.50 of 8.00 ms per step, overlap 56%"
    waiting, communication = lane_totals(browser, "waiting"), lane_totals(browser, "communication")
    for rank in figures.ranks:
        assert waiting[rank.rank] == pytest.approx(rank.exposed_ms, abs=1e-6)
        assert communication[rank.rank] == pytest.approx(rank.communication_ms, abs=1e-6)
    table = browser.text("#tables table")
    assert re.search(r"rank 0\s+20\.0\s+6\.00\s+8\.00\s+24\.0\s+12\.0\s+50%", table)
    assert re.search(r"rank 1\s+20\.0\s+6\.00\s+8\.00\s+24\.0\s+9\.00\s+62%", table)
    assert "layer1.weight, layer1.bias" in browser.text("#tables")
    # Something was painted: not one colour only.
    colours = browser.run("""(() => { const c = page.timelines[0].canvas;
      const d = c.getContext("2d").getImageData(0, 0, c.width, c.height).data, seen = new Set();
      for (let i = 0; i < d.length; i += 4) seen.add(d[i] << 16 | d[i + 1] << 8 | d[i + 2]);
      return seen.size; })()""")
    assert colours > 8
    assert browser.problems == []


@needs_browser
def test_what_is_pointed_at_is_told(browser, tmp_path):
    browser.open(page_of(tmp_path, write_trace(tmp_path / "run.json")))
    x, y = (
        browser.run("""(() => { const t = page.timelines[0], box = t.canvas.getBoundingClientRect();
      const band = t.layout.bands.find((b) => b.kind === "bucket"), i = band.lane.after(t.origin);
      const middle = (band.lane.launch[i] + band.lane.end[i]) / 2;
      return [box.x + t.painter.toX(t.scale, middle), box.y + band.top + band.height / 2]; })()""")
    )
    browser.mouse("mouseMoved", x, y)
    tip = browser.text("#tip")
    assert "bucket 0" in tip
    assert "filling 2.000 ms, waiting to be sent 0 ns, in flight 5.000 ms" in tip
    assert "exposed 1.000 ms" in tip
    assert "1.0 KiB" in tip
    assert "layer0.weight, layer0.bias" in tip
    assert "path ring/moves" in tip
    browser.click(x, y)
    assert "rank 0: bucket 0" in browser.text("#detail")
    browser.run("document.querySelectorAll('#detail button')[1].click()")
    assert "A chunk is 512 B of the 1.0 KiB" in browser.text("#move-text")
    assert browser.problems == []


def select_operation(browser, number):
    """Selects an operation of rank 0 and asks for its moves; what is said of it."""
    return browser.run(f"""(() => {{ const t = page.timelines[0];
      for (const band of t.layout.bands.filter((b) => b.kind === "operation" && b.rank === 0)) {{
        const index = band.lane.number.indexOf({number});
        if (index < 0) continue;
        t.show({{ band, lane: band.lane, index }});
        document.querySelectorAll("#detail button")[1].click();
        return document.getElementById("detail").innerText;
      }} }})()""")


def drawn_values(browser):
    """The numbers in the stepper's cells, by (rank, chunk)."""
    cells = browser.run("""[...document.querySelectorAll("#moves text.value")].map((cell) =>
      [cell.dataset.rank, cell.dataset.chunk, cell.textContent].map(Number))""")
    return {(rank, chunk): value for rank, chunk, value in cells}


@needs_browser
def test_the_stepper_draws_what_the_operation_ran(browser, tmp_path):
    """A ring of two: each chunk is added up on one of the ranks, then both are passed on."""
    browser.open(page_of(tmp_path, write_trace(tmp_path / "run.json")))
    chosen = "document.getElementById('algorithm').selectedOptions[0].innerText"
    assert "path two_shot/stage" in select_operation(browser, 3)
    assert browser.run(chosen) == "two_shot (ran)"
    assert "path ring/moves" in select_operation(browser, 2)
    assert browser.run(chosen) == "ring (ran)"
    before = {(0, 0): 1, (1, 0): 2, (0, 1): 11, (1, 1): 12}
    assert drawn_values(browser) == before
    press = "document.getElementById('move-on').click()"
    browser.run(press)
    added = drawn_values(browser)
    changed = {place: value for place, value in added.items() if value != before[place]}
    assert sorted(changed.values()) == [3, 23]
    assert {rank for rank, _ in changed} == {0, 1}
    sentence = browser.text("#move-text")
    for rank, chunk in changed:
        assert f"rank {1 - rank} sends chunk {chunk} to rank {rank}, which adds it" in sentence
    browser.run(press)
    assert drawn_values(browser) == {(0, 0): 3, (1, 0): 3, (0, 1): 23, (1, 1): 23}
    assert "Done." in browser.text("#move-text")
    assert browser.problems == []


@needs_browser
def test_other_algorithms_are_not_said_to_have_run(browser, tmp_path):
    browser.open(page_of(tmp_path, write_trace(tmp_path / "run.json", buckets=1)))
    options = browser.run("[...document.getElementById('algorithm').options].map((o) => o.text)")
    assert "ring (ran)" in options and {"two_shot", "tree", "one_shot"} <= set(options)


def colours_at(browser, times_ms):
    """Red, green and blue under the lowest band of rank 0, at some times of the step."""
    return browser.run(f"""(() => {{ const t = page.timelines[0], {{ painter, layout }} = t;
      const ratio = window.devicePixelRatio, y = (layout.blocks[0].bottom - 4) * ratio;
      const row = painter.context.getImageData(0, y, painter.canvas.width, 1).data;
      return {times_ms}.map((time) => {{
        const x = painter.toX(t.scale, t.origin + time * {MS}), at = 4 * Math.round(x * ratio);
        return [...row.slice(at, at + 3)]; }}); }})()""")


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_exposed_time_is_shaded(browser, tmp_path, scheme):
    """From 14 to 18 ms of a step, on rank 1 from 15: behind the lanes, and only there."""
    browser.colours(scheme)
    try:
        browser.open(page_of(tmp_path, write_trace(tmp_path / "run.json", late=1.0)))
        beside, within = [3.5, 9.5, 13.5, 18.5], [14.5, 15.5, 16.5, 17.5]  # no line of the axis
        found = colours_at(browser, beside + within)
        plain, *others = found[:4]
        assert others == [plain] * 3
        for red, green, blue in found[4:]:
            assert red - green > plain[0] - plain[1] + 15 and red - blue > plain[0] - plain[2] + 15
        lane = """(() => { const b = page.timelines[0].layout.blocks[1].waiting;
          return [b.begin[0], b.end[0]]; })()"""
        assert browser.run(lane) == [15 * MS, 18 * MS]
    finally:
        browser.colours("light")


@needs_browser
def test_keys_move_and_zoom(browser, tmp_path):
    browser.open(page_of(tmp_path, write_trace(tmp_path / "run.json", steps=5)))
    span = "page.view.end - page.view.begin"
    browser.run("page.timelines[0].canvas.focus()")
    one_step = browser.run(span)
    browser.press("+")
    assert browser.run(span) == pytest.approx(0.6 * one_step)
    browser.press("0")
    assert browser.run(span) == pytest.approx(1.02 * 98e6, rel=0.01)
    step = browser.run("page.timelines[0].step")
    browser.press("S")
    assert browser.run("page.timelines[0].step") == step - 1
    browser.press("1", "ArrowDown", "ArrowDown", "ArrowRight")
    first = browser.text("#detail")
    browser.press("ArrowRight")
    assert browser.text("#detail") != first
    browser.press("Enter")
    assert browser.run(span) < one_step
    browser.press("Escape")
    assert "Point at anything" in browser.text("#detail")
    assert browser.problems == []


@needs_browser
def test_two_runs_lie_under_each_other(browser, tmp_path):
    slow = write_trace(tmp_path / "slow.json", steps=2)
    fast = write_trace(tmp_path / "fast.json", steps=4, late=2.0)
    browser.open(page_of(tmp_path, slow, fast))
    assert browser.run("[...document.querySelectorAll('h1')].map((h) => h.innerText)") == [
        "exposed 4.00 of 8.00 ms per step, overlap 50%",
        "exposed 3.00 of 8.00 ms per step, overlap 62%",
    ]
    assert browser.run("page.timelines.map((t) => t.run.name)") == ["slow", "fast"]
    # Both begin their step at the same place.
    places = browser.run("page.timelines.map((t) => t.painter.toX(t.scale, t.steps[t.step][0]))")
    assert places[0] == pytest.approx(places[1])
    assert browser.problems == []


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_it_without_scrolling_sideways(browser, tmp_path, scheme):
    browser.size(390, 844, phone=True)
    browser.colours(scheme)
    try:
        browser.open(page_of(tmp_path, write_trace(tmp_path / "run.json")))
        assert browser.run("document.documentElement.scrollWidth") == 390
        page, ink = browser.run(
            "['backgroundColor', 'color'].map((name) => getComputedStyle(document.body)[name])"
        )
        brightness = [sum(map(int, re.findall(r"\d+", text)[:3])) for text in (page, ink)]
        assert (brightness[0] > brightness[1]) == (scheme == "light")
        assert browser.problems == []
    finally:
        browser.size(1280, 900)
        browser.colours("light")


@needs_browser
def test_names_of_a_trace_are_no_markup(browser, tmp_path):
    evil = "</script><img src=x onerror=alert(1)>"
    path = write_trace(tmp_path / "run.json", error=f"Boom: {evil}", transport=evil)
    browser.open(page_of(tmp_path, path))
    assert evil in browser.text(".trouble")
    assert browser.run("document.images.length") == 0
    assert browser.problems == []


@needs_browser
def test_a_long_trace_is_drawn_in_shades_that_add_up(browser, tmp_path):
    """More events than pixels: the whole run in view, and no time is lost."""
    path = write_trace(tmp_path / "run.json", steps=60, buckets=30)
    browser.open(page_of(tmp_path, path))
    browser.run("page.everything(); page.draw(true)")
    readout = browser.text(".run > p")
    figures = figures_of(read_run(path))
    total = figures.communication_ms
    seen = float(re.search(r"communication ([\d.]+) ms", readout)[1])
    assert seen == pytest.approx(total, rel=1e-3)
    script = """(() => { const lane = page.timelines[0].run.lanes.find(
      (lane) => lane.kind === "communication");
      let sum = 0; for (let i = 0; i < 1200; i++) sum += lane.between(i * 1e6, (i + 1) * 1e6);
      return sum / 1e6; })()"""
    assert browser.run(script) == pytest.approx(total, rel=1e-3)
    assert browser.problems == []


def test_the_page_asks_for_nothing(tmp_path):
    text = page_text([read_run(write_trace(tmp_path / "run.json"))])
    assert "default-src 'none'" in text
    assert not re.search(r"""(src|href)\s*=\s*["'](?!data:)""", text)
    assert "{{" not in text
    data = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1]
    assert json.loads(data)["runs"][0]["name"] == "run"


def test_show_needs_no_compiled_code():
    code = "import sys, dpcore.tools.show, dpcore.tools.show.command; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "dpcore._C", "matplotlib"} & set(out.stdout.split())


@needs_browser
@pytest.mark.parametrize("communicates", [True, False])
def test_a_run_without_steps_is_drawn_whole(browser, tmp_path, communicates):
    """What any program leaves that does not train: operations and spans, or spans only."""

    def body(comm, path):
        with dp.trace(path, comm=comm) as t:
            with t.span("thinking"):
                np.ones(1000).sum()
            t.mark("done")
            if communicates:
                comm.all_reduce(np.ones(1000))
                comm.barrier()

    path = tmp_path / "run.json"
    dp.spawn(body, 2, path, mode="threads")
    browser.open(page_of(tmp_path, path))
    heading = browser.text("h1")
    assert ("per step" not in heading) and ("overlap" in heading) == communicates
    assert communicates or heading == "no communication was recorded"
    assert browser.run("page.view.end - page.view.begin") >= read_run(path).end_ns
    browser.run("page.timelines[0].canvas.focus()")
    browser.press("s", "ArrowDown", "ArrowRight", "Enter", "0", "1", "-", "Escape")
    assert browser.problems == []


@needs_browser
def test_a_million_events_are_drawn_with_a_stroke_per_pixel(browser, tmp_path):
    """What lets long traces open and move at once: the cost of a frame is that of its pixels."""
    browser.open(page_of(tmp_path, write_trace(tmp_path / "run.json")))
    strokes, share = browser.run("""(() => {
      const n = 1e6, column = (value) => new Uint32Array(n).fill(value);
      const lane = new Lane({ count: n }, 1000, [column(4), column(1), column(0), column(0)]);
      const painter = page.timelines[0].painter, shades = [];
      painter.context.fillRect = () => shades.push(painter.context.globalAlpha);
      const scale = { left: 92, right: 1272, begin: 0, end: lane.end[n - 1] };
      painter.lane(scale, lane, 0, 10, () => "#000");
      delete painter.context.fillRect;
      return [shades.length, shades[600]]; })()""")
    assert strokes == 1180
    assert share == pytest.approx(0.15 + 0.85 / 4, abs=0.01)  # a quarter of the time is covered
