"""``dpcore show ring``: an algorithm to step through, without a trace."""

import json
import re

import pytest

from dpcore import reference
from dpcore.__main__ import main
from dpcore.base.own_algorithm import schedule_of
from tests.swing import SWING

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


def test_one_of_ones_own_stands_beside_the_others(tmp_path, capsys, monkeypatch):
    """For 2, 4 and 8 ranks: there is none for the others."""
    monkeypatch.chdir(tmp_path)
    assert main(["show", SWING, "--world", "8"]) == 0
    plan = schedule_of(SWING, "all_reduce", 8)
    assert capsys.readouterr().out == reference.describe(plan) + "wrote swing.html\n"
    content = content_of(tmp_path / "swing.html")
    assert content["world"] == "8"
    for world, of_world in content["schedules"].items():
        known = of_world["all_reduce"]
        names = [*reference.algorithms_of("all_reduce")]
        if world in "248":
            names.append("swing.py:swing")
        assert list(known["algorithms"]) == names
        assert known["first"] == (names[-1] if world in "248" else "two_shot")
        assert "swing.py:swing" not in of_world["broadcast"]["algorithms"]
    steps = content["schedules"]["8"]["all_reduce"]["algorithms"]["swing.py:swing"]["moves"]
    assert [len(step) for step in steps] == [32, 16, 8, 8, 16, 32]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([SWING, "--world", "6"], "swing for 6 ranks: swing.py:"),
        ([SWING, "--world", "16"], "16 ranks can't be drawn: choose 2 to 8"),
        ([SWING, "--collective", "broadcast"], "it is for all_reduce, not for broadcast"),
        ([SWING, "--json"], "--json is for a trace, and"),
        (["nowhere.py:swing"], "there is no file nowhere.py"),
        (["fine.py:fine"], "fine.py:fine has 2000 chunks on 4 ranks, more than one can follow"),
        (["fine.py:half"], "algorithm fine.py:half for 4 ranks is wrong: rank 2 ends without a co"),
    ],
)
def test_mistakes_with_ones_own_are_explained(tmp_path, capsys, monkeypatch, arguments, message):
    (tmp_path / "fine.py").write_text(
        "def fine(world):\n"
        " return [(0, a, b, c, True)"
        " for a in range(world) for b in range(world) for c in range(2000) if a != b]\n"
        "def half(world):\n"
        " return [(0, a, b, 0, True) for a in range(world) for b in (0, 1) if a != b]\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["show", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.glob("*.html")] == []


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
