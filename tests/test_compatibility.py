"""docs/compatibility.md says what the record of tests says, and nothing that did not run."""

import doctest
import json
import re

import pytest

from tools import compatibility

REPORT = """<testsuites><testsuite>
<testcase name="one"/><testcase name="two"><failure message="no"/></testcase>
<testcase name="three"><skipped message="needs Ray"/></testcase>
</testsuite></testsuites>"""
SKIPPED = re.sub(r'<testcase name="one"/>|<testcase name="two">.*?</testcase>', "", REPORT)
WHERE = {"system": "Debian", "date": "2026-01-02", "commit": "abc", "version": "2.54"}


def outcome(report=REPORT, row="Ray Train", python="3.11.7", torch="2.13.0+cpu"):
    own = {"row": row, "python": python, "torch": torch}
    return own | WHERE | compatibility.outcome_of(report)


def test_the_page_is_what_the_record_says(capsys):
    assert compatibility.main([]) == 0, capsys.readouterr().out


def test_what_the_page_says_has_passed_is_in_the_record():
    """By the page alone, without the code that wrote it."""
    record = [json.loads(line) for line in compatibility.RECORD.read_text().splitlines()]
    said = sum(map(int, re.findall(r"(\d+) passed", compatibility.PAGE.read_text())))
    assert said == sum(one.get("passed", 0) for one in record) > 0
    assert not [one["row"] for one in record if one.get("failed") or one["commit"] == ""]
    assert len({json.dumps([one["row"], one["python"], one["torch"]]) for one in record}) == len(
        record
    )


def test_what_its_functions_say_of_themselves():
    result = doctest.testmod(compatibility)
    assert result.attempted > 2 and result.failed == 0


def test_each_row_has_tests_that_exist():
    for row in compatibility.ROWS:
        assert (compatibility.ROOT / row.tests.removeprefix("@")).exists(), row
    assert len({row.name for row in compatibility.ROWS}) == len(compatibility.ROWS)


def test_a_row_says_what_came_of_it_or_that_it_did_not_run():
    page = compatibility.page([outcome(), outcome(SKIPPED, "Accelerate")])
    ray = "| Ray Train | 2.54 | 3.11, 2.13 | 1 passed, **1 failed**, 1 skipped |"
    assert ray in page
    assert "| Accelerate | 2.54 | 3.11, 2.13 | did not run: needs Ray |" in page
    assert "| srun of Slurm | | | did not run |" in page
    assert page.count("passed") == 1 and "They did not run." in page


def test_a_run_replaces_what_the_same_versions_did_before():
    quick = [
        outcome(row="make test-quick", python=python, torch=torch)
        for python, torch in (("3.12.1", "2.13.0"), ("3.9.1", "2.9.0"), ("3.11.7", "2.15.0"))
    ]
    record = []
    for one in quick:
        record = compatibility.with_new(record, one)
    assert [one["python"] for one in record] == ["3.9.1", "3.11.7", "3.12.1"]
    again = outcome(SKIPPED, row="make test-quick", python="3.11.8", torch="2.15.1+cpu")
    assert compatibility.with_new(record, again)[1] == again
    lines = compatibility.page(compatibility.with_new(record, again)).splitlines()
    assert "| | torch 2.9 | torch 2.13 | torch 2.15 |" in lines
    assert "| Python 3.11 | did not run | did not run | did not run: needs Ray |" in lines


def installed_with(environment, extra):
    """Also what other extras have that it names, as in dpcore[lightning,transformers]."""
    for requirement in environment.requirements(extra):
        names = re.findall(r"^dpcore\[(.+)\]$", requirement)
        for name in names[0].split(",") if names else ():
            yield from installed_with(environment, name)
        yield requirement


@pytest.mark.parametrize("extra", ["lightning", "accelerate", "transformers", "ray"])
def test_what_an_extra_installs_has_run(extra, monkeypatch):
    """And `make test` runs it again."""
    monkeypatch.syspath_prepend(str(compatibility.ROOT / "tools"))
    import environment

    record = [json.loads(line) for line in compatibility.RECORD.read_text().splitlines()]
    ran = {one["version"] for one in record if one.get("passed")}
    pins = [one for one in environment.requirements(extra) if not one.startswith("torch>=")]
    for requirement in pins:
        assert requirement.rpartition("==")[2] in ran, requirement
        assert extra == "ray" or requirement in installed_with(environment, "frameworks")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "Ray"], "--only is about --run"),
        (["--run", "--only", "Rey"], "no row has this in its name. There are\n  make test-quick\n"),
    ],
)
def test_wrong_arguments(arguments, said, capsys):
    with pytest.raises(SystemExit):
        compatibility.main(arguments)
    assert said in capsys.readouterr().err
