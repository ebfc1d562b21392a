"""``dpcore show ring``: an algorithm to step through, without a trace."""

import json
import re

import pytest

from dpcore import reference
from dpcore.__main__ import main

from .browser import needs_browser
from .test_page import drawn_values


def content_of(page):
    found = re.search(
        r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.S
    )
    return json.loads(found[1])


def test_the_page_has_every_algorithm_and_begins_with_the_one_that_is_named(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert main(["show", "bruck", "--collective", "all_to_all", "--world", "5"]) == 0
    plan = reference.make_schedule("bruck", "all_to_all", 5)
    assert capsys.readouterr().out == reference.describe(plan) + "wrote bruck.html\n"
    assert [path.name for path in tmp_path.iterdir()] == ["bruck.html"]
    content = content_of(tmp_path / "bruck.html")
    assert content["runs"] == [] and content["world"] == "5"
    assert list(content["schedules"]) == [str(world) for world in range(2, 9)]
    for of_world in content["schedules"].values():
        assert next(iter(of_world)) == "all_to_all"
        assert of_world["all_to_all"]["first"] == "bruck"
        for collective, known in of_world.items():
            assert list(known["algorithms"]) == reference.algorithms_of(collective)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ring", "--world", "9"], "9 ranks can't be drawn: choose 2 to 8"),
        (["ring", "--world", "1"], "1 ranks can't be drawn"),
        (["ring", "--collective", "gather"], "ring is not an algorithm of gather, but of"),
        (["ring", "--json"], "--json is for a trace, and ring is an algorithm"),
        (["rign"], "there is no file rign, and no algorithm of that name: one_shot, two_shot,"),
        (["run.json", "--world", "4"], "--world is for an algorithm, not for a trace: one_shot"),
    ],
)
def test_mistakes_are_explained(tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(["show", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_called_like_an_algorithm_is_read(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ring").write_text("")
    assert main(["show", "ring"]) == 2
    assert "ring is not a trace: it is empty" in capsys.readouterr().err


@needs_browser
def test_its_moves_can_be_stepped_through(browser, tmp_path):
    page = tmp_path / "page.html"
    assert main(["show", "ring", "--html", str(page)]) == 0
    browser.open(page)
    assert browser.text("h1") == "all_reduce by ring, 4 ranks"
    shown = "getComputedStyle(document.querySelector('{}')).display"
    for of_runs in ("nav", "#detail", ".keys", "#stepper .of-runs"):
        assert browser.run(shown.format(of_runs)) == "none"
    for _ in range(6):
        browser.run("document.getElementById('move-on').click()")
    assert "Done." in browser.text("#move-text")
    values = {chunk: 10 + 40 * chunk for chunk in range(4)}
    assert drawn_values(browser) == {(r, c): v for r in range(4) for c, v in values.items()}
    browser.run("""(() => { const world = document.getElementById("world"); world.value = "3";
      world.dispatchEvent(new Event("change")); })()""")
    assert browser.text("h1") == "all_reduce by ring, 3 ranks"
    assert browser.text("#move-number") == "step 0 of 4"
    assert browser.problems == []
