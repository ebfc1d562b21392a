"""The page and the table of a comparison, of rounds that are made up."""

import html
import re

from dpcore.compare.figures import figures_of
from dpcore.compare.output import Outcome, overlap_text, ratio_text, write_csv
from dpcore.compare.page import page_text
from dpcore.compare.plan import Cell, contenders
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
    assert "class='unsure'" in page_text("mlp", FACTS, [few])
    write_csv(tmp_path / "few.csv", "mlp", [few])
    assert (tmp_path / "few.csv").read_text().splitlines()[-1].endswith(",False")


def test_an_overlap_that_nobody_knows_has_no_number():
    assert overlap_text(outcome(lambda n: 100.0 + (-1) ** n * 8).figures[1]) == "unknown"
    assert overlap_text(outcome(lambda n: 104.0).figures[1]) == "20% (20% – 20%)"


def test_one_contender_alone_has_a_page():
    alone = outcome(lambda n: 99.0, contenders("torch"))
    assert "nothing to compare it with" in page_text("mlp", FACTS, [alone])
