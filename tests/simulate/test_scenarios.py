"""The scenarios of examples/scenarios: what their README says of them."""

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "scenarios" / "published.py"


@pytest.fixture(scope="module")
def scenario():
    return runpy.run_path(str(EXAMPLE))


def test_the_books_speedups_need_some_computing_time(scenario):
    ((*_, of_8),) = scenario["book"]([(8, "40gbit,5us")], [0.05])
    assert of_8 == pytest.approx(6.5, abs=0.3)
    sooner, later = (row[-1] for row in scenario["book"]([(2, "10gbit,20us")], [0.1, 0.2]))
    assert sooner < 1.7 < later
    ((*_, slow),) = scenario["book"]([(2, "1gbit,50us")], [0.4])
    assert slow < 1


def test_dear_saves_most_where_both_take_as_long(scenario):
    models = [("ResNet-50", scenario["RESNET_50"], (0.1, 0.4))]
    equal, _, much_computing, _ = (row[4] for row in scenario["dear"](models))
    assert equal == pytest.approx(0.13, abs=0.03)
    assert much_computing == pytest.approx(0, abs=0.02)


def test_both_say_that_they_are_extrapolated():
    assert EXAMPLE.read_text().count("extrapolated") >= 3
    assert "extrapolated" in (EXAMPLE.parent / "README.md").read_text()
