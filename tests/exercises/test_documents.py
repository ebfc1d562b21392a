"""docs/exercises.md and docs/teach.md say what is so."""

import re
from pathlib import Path

import pytest

from dpcore.school.exercise import catalogue, judging, lab, report

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
KNOWN = catalogue.exercises()


def test_the_table_has_every_exercise():
    text = (DOCS / "exercises.md").read_text()
    rows = re.findall(r"^\| (\d+) \| (.+?) \| (\d+) \|", text, re.MULTILINE)
    assert rows == [(str(one.number), one.title, str(one.minutes)) for one in KNOWN]


def test_pages_lead_to_their_exercises_and_back():
    text = (DOCS / "exercises.md").read_text()
    for number, row in re.findall(r"^\| (\d+) \|(.*)$", text, re.MULTILINE):
        for page in re.findall(r"\((learn/[^)]+)\)", row)[:1]:
            found = re.findall(r"\[exercises? ([\d and]+)\]", (DOCS / page).read_text())
            if found:
                assert found[0].split(" and "), (number, page)
    for page in sorted((DOCS / "learn").glob("[1-7]-*.md")):
        (numbers,) = re.findall(r"\[exercises? ([\d and]+)\]\(../exercises.md\)", page.read_text())
        for number in numbers.split(" and "):
            assert catalogue.find(number)


def test_the_limits_that_are_named_are_the_limits():
    text = " ".join((DOCS / "exercises.md").read_text().split())
    assert f"After {lab.PATIENCE:.0f} seconds of waiting" in text
    assert f"runs for {lab.SECONDS:.0f} seconds is stopped" in text
    assert f"{lab.MEMORY >> 30} GiB of memory and {lab.SECONDS:.0f} seconds" in text


@pytest.mark.parametrize(("load", "times"), [(0.5, 1.0), (6.0, 3.0), (80.0, 5.0)])
def test_a_rank_has_more_time_on_a_busy_machine(load, times, monkeypatch):
    """A right solution takes longer there, and is right all the same."""
    monkeypatch.setattr(lab.os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(lab.os, "sched_getaffinity", lambda process: {0, 1})
    assert lab.slowness() == times


def test_every_field_is_documented():
    text = (DOCS / "exercises.md").read_text().split("### The fields of")[1].split("###")[0]
    exercise = KNOWN[6]
    results = [
        judging.Result("one", "It adds.", True),
        judging.Result("two", "It ends.", None, "-"),
    ]
    verdict = judging.Verdict(exercise, Path("buckets.py"), "0" * 64, results)
    found = report.for_gradescope([verdict])
    names = {*found, *found["tests"][0], *found["tests"][0]["extra_data"], *found["extra_data"]}
    names |= set(found["extra_data"]["exercises"][0])
    said = set(re.findall(r"[a-z_0-9]+", " ".join(re.findall(r"`([^`]+)`", text))))
    assert not names - said
    assert (found["score"], found["max_score"]) == (1, 2)


def test_what_a_class_does_takes_ninety_minutes():
    text = (DOCS / "teach.md").read_text()
    rows = re.findall(r"^\| (\d):(\d\d) \| (\d+) \|", text, re.MULTILINE)
    now = 0
    for hours, minutes, takes in rows:
        assert now == 60 * int(hours) + int(minutes)
        now += int(takes)
    assert now == 90
    assert len(re.findall(r"^\*\*[^*]+\*\* ", text, re.MULTILINE)) >= 10  # questions


@pytest.mark.parametrize("number", ["1", "4"])
def test_a_class_has_time_for_its_exercises(number):
    text = (DOCS / "teach.md").read_text()
    (takes,) = re.findall(rf"^\| \d:\d\d \| (\d+) \|.*\| exercise {number} \|", text, re.MULTILINE)
    assert int(takes) >= catalogue.find(number).minutes / 2
