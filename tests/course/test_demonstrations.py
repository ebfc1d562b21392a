"""Every demonstration runs in its quick mode, draws its figure and prints its table."""

import importlib.util
import json
import os
import re

import pytest

from benchmarks import course
from tests.course.conftest import COURSE
from tests.ranks import python

is_missing = importlib.util.find_spec("sklearn") is None
pytestmark = pytest.mark.skipif(is_missing, reason="scikit-learn is not installed")

ROOT = COURSE.parents[1]
FULL = os.environ.get("DPCORE_TEST_FULL") == "1"
QUICKEST = ("throughput", "accuracy", "batch_norm", "local_updates")
PNG = b"\x89PNG\r\n"


def demonstrate(folder, name, *arguments):
    """In a folder of its own, with the figure where it comes by default."""
    command = [COURSE / f"{name}.py", "--quick", *arguments]
    return python.run(*command, capture_output=True, text=True, timeout=240, cwd=folder)


@pytest.mark.parametrize("name", course.DEMONSTRATIONS if FULL else QUICKEST)
def test_it_runs(tmp_path, name):
    out = demonstrate(tmp_path, name, "--json")
    assert out.returncode == 0, out.stderr
    assert (tmp_path / f"{name}.png").read_bytes().startswith(PNG)
    found = json.loads(out.stdout)
    assert found["demonstration"] == name and found["quick"]
    assert found["rows"] and found["said"]
    assert len({tuple(row) for row in found["rows"]}) == 1
    assert re.search(rf"^{name}\.png, \d+ s$", out.stderr, re.M)


def test_the_table_is_what_people_read(tmp_path):
    out = demonstrate(tmp_path, "all_reduce_ways", "--out", "ways.svg")
    assert out.returncode == 0, out.stderr
    header, *lines = out.stdout.split("\n\n")[0].splitlines()
    assert header.split("  ")[0] == "way" and len(lines) == 6
    assert (tmp_path / "ways.svg").read_text().startswith("<?xml")


def test_a_figure_that_cannot_be_written_is_said_first(tmp_path):
    for wrong, why in (("x.gif", "ends in .png"), ("no/such/x.png", "there is no folder no/such")):
        out = demonstrate(tmp_path, "throughput", "--out", wrong)
        assert out.returncode == 2
        assert why in out.stderr


def test_help_says_what_it_is(tmp_path):
    out = demonstrate(tmp_path, "accuracy", "--help")
    assert out.returncode == 0
    assert "Accuracy that more ranks lose" in out.stdout and "--quick" in out.stdout


# ---- the pages -------------------------------------------------------------------------------


def test_the_page_shows_every_demonstration_and_what_was_kept():
    page = course.PAGE.read_text()
    assert tuple(name for _, name, _ in course.BLOCK.findall(page)) == course.DEMONSTRATIONS
    assert course.rendered(page) == page, "python -m benchmarks.course --write"
    readme = (COURSE / "README.md").read_text()
    assert [name for name in course.DEMONSTRATIONS if f"`{name}.py`" not in readme] == []


def test_a_wrong_name_is_refused():
    out = python.run("-m", "benchmarks.course", "acuracy", capture_output=True, text=True, cwd=ROOT)
    assert out.returncode == 2
    assert "acuracy: choose from throughput" in out.stderr
