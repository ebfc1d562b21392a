"""The page and the table of a comparison, of rounds that are made up."""

import html
import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from dpcore.tools.compare.figures import figures_of
from dpcore.tools.compare.output import (
    WIDEST,
    Outcome,
    number,
    overlap_text,
    ratio_text,
    records,
    table,
    tell,
    write_csv,
)
from dpcore.tools.compare.page import page_text
from dpcore.tools.compare.picture import write_picture
from dpcore.tools.compare.plan import Cell, contenders
from dpcore.tools.ratios import Estimate
from tests.compare.test_figures import TWO, rounds

FACTS = {
    "machine": {"cores": 2, "cpu": "<any & all>"},
    "date": "2026-11-23T00:00:00",
    "commit": "abc",
    "command": "dpcore compare '<b>'",
}


def outcome(default_ms, entrants=TWO):
    made = figures_of(entrants, rounds(lambda n: 110.0 + n % 3, default_ms))
    return Outcome(Cell("", "machine", 2), made, ["a <note>"])


def test_the_page_is_whole_and_loads_nothing():
    page = page_text("my.py:make", FACTS, [outcome(lambda n: 99.0 + n % 3)])
    text = html.unescape(re.sub(r"<style>.*?</style>|<[^>]*>", " ", page, flags=re.DOTALL))
    assert "2 cores of <any & all>, 2026-11-23, dpcore abc" in text
    assert "default is faster than torch" in text
    assert "a <note>" in text and "dpcore compare '<b>'" in text
    assert not re.search(r"<script|https?://|src=|@import", page)
    for tag in ("section", "table", "dl", "div", "main"):
        assert page.count(f"<{tag}") == page.count(f"</{tag}>")
    widths = [float(width) for width in re.findall(r"width:([\d.]+)%", page)]
    assert widths and all(0 <= width <= 100 for width in widths)
    lefts = [float(left) for left in re.findall(r"left:(-?[\d.]+)%", page)]
    assert lefts and all(0 <= left <= 100 for left in lefts)


def test_what_proves_nothing_is_marked():
    unsure = outcome(lambda n: 110.0 + (-1) ** n * 5)
    default = unsure.figures[1]
    assert ratio_text(default).endswith(" ?")
    assert "class='unsure'" in page_text("mlp", FACTS, [unsure])
    sure = outcome(lambda n: 99.0 + n % 3)
    assert "?" not in ratio_text(sure.figures[1])
    assert "class='unsure'" not in page_text("mlp", FACTS, [sure])


def test_few_rounds_prove_nothing_wherever_it_is_said(tmp_path):
    made = figures_of(TWO, rounds(lambda n: 110.0 + n % 3, lambda n: 99.0 + n % 3, count=5))
    few = Outcome(Cell("", "machine", 2), made, [])
    assert "too few to conclude anything" in few.verdicts[0]
    assert ratio_text(made[1]).endswith(" ?")
    page = page_text("mlp", FACTS, [few])
    assert "class='unsure'" in page
    assert "with the range of 5 rounds</h3>" in page
    console = Console(record=True, width=150)
    tell(console, few)
    assert "In brackets: range of 5 rounds." in console.export_text()
    write_csv(tmp_path / "few.csv", "mlp", [few])
    assert (
        (tmp_path / "few.csv")
        .read_text()
        .splitlines()[-1]
        .endswith(",False,,,,,,99 100 101 99 100")
    )
    (_, line) = records("mlp", {}, [few])
    assert line["ratio"]["confidence"] is None and line["ratio"]["rounds"] == 5
    enough = outcome(lambda n: 99.0 + n % 3)
    assert "with the 95% interval</h3>" in page_text("mlp", FACTS, [enough])
    assert records("mlp", {}, [enough])[1]["ratio"]["confidence"] == 0.95


def uneven():
    """The medians of the parts of a step do not add up to that of the whole: what is exposed in
    one round slows computing down in the next one."""
    made = rounds(lambda n: 110.0 + n % 3, lambda n: (120.0, 120.0, 150.0)[n % 3])
    for at, one in enumerate(made):
        one["tails"]["dpcore"] = [[(0.5 + (20, 0, 40)[at % 3]) / 1e3]] * 2
    figures = figures_of(TWO, made)
    parts = (figures[1].alone, figures[1].slowdown, figures[1].exposed)
    assert abs(sum(part.median for part in parts) - figures[1].step.median) > 1
    return Outcome(Cell("", "machine", 2), figures, [])


def test_bars_end_at_the_median_that_is_written_beside_them(tmp_path, monkeypatch):
    shown = uneven()
    medians = [one.step.median for one in shown.figures]
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, _: drawn.append(figure))
    assert write_picture(tmp_path / "compare.png", "mlp", [shown])
    (axes,) = drawn[0].axes
    ends = [bar.get_x() + bar.get_width() for bar in axes.containers[-1]]
    assert ends == pytest.approx(medians)
    assert [text.get_text() for text in axes.texts] == [f"  {number(m)} ms" for m in medians]
    assert axes.get_xlabel() == "step, ms: median and 95% interval"
    page = page_text("mlp", FACTS, [shown])
    widest = max(one.step.high for one in shown.figures)
    bars = re.findall(r"<span class='bar'>(.*?)<u", page)
    widths = [sum(map(float, re.findall(r"width:([\d.]+)%", bar))) for bar in bars]
    assert widths == pytest.approx([100 * m / widest for m in medians], abs=0.01)


def test_an_overlap_that_nobody_knows_has_no_number():
    assert overlap_text(outcome(lambda n: 100.0 + (-1) ** n * 8).figures[1]) == "unknown"
    assert overlap_text(outcome(lambda n: 104.0).figures[1]) == "20% (20% – 20%)"


@pytest.mark.parametrize("width", [60, 80, 100])
def test_no_figure_is_cut_on_a_narrow_terminal(width):
    slow = Estimate(-123.4, -987.6, 999.4, 15, 0.95)
    made = [
        replace(one, step=slow, exposed=slow, slowdown=slow, loss=0.123456, memory_mib=123456.0)
        for one in outcome(lambda n: 104.0).figures
    ]
    shown = Outcome(Cell("", "machine", 2), made, [], optimizer="SGD", memory_alone_mib=1.0)
    console = Console(record=True, width=width, file=io.StringIO())
    tell(console, shown)
    text = console.export_text()
    assert "…" not in text
    assert text.count("-123 (-988") + text.count("(-988–999)") == 3 * len(made)
    assert all(len(line) <= width for line in text.splitlines() if not line.startswith("* "))


def test_no_row_is_folded_where_there_is_no_terminal(capsys):
    """With figures of three digits and their intervals in every column."""
    wide = Estimate(-0.1234, -0.9876, -0.1111, 15, 0.95)
    slow = Estimate(-123.4, -987.6, 999.4, 15, 0.95)
    known = {"step": slow, "exposed": slow, "slowdown": slow, "overlap": wide, "loss": 0.123456}
    made = [
        replace(one, contender="dpcore per_parameter 100", memory_mib=123456.0, **known)
        for one in outcome(lambda n: 104.0).figures
    ]
    made[1] = replace(made[1], ratio=Estimate(1.123, 0.987, 1.234, 15, 0.95))
    shown = Outcome(Cell("", "machine", 2), made, [], optimizer="SGD", memory_alone_mib=1.0)
    Console(width=WIDEST, highlight=False).print(table(shown, WIDEST))
    rows = [line for line in capsys.readouterr().out.splitlines() if "999" in line]
    assert len(rows) == len(made)
    assert all("dpcore per_parameter 100" in row and "123456" in row for row in rows)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.01234, "0.0123"), (999.4, "999"), (999.9, "1000"), (-12345.6, "-12346")],
)
def test_a_number_has_no_exponent(value, text):
    assert number(value) == text


def test_one_contender_alone_has_a_page():
    alone = outcome(lambda n: 99.0, contenders(["torch"]))
    assert "nothing to compare it with" in page_text("mlp", FACTS, [alone])
