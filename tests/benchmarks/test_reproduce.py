"""``dpcore bench --reproduce``: claims from the committed results, and what becomes of them."""

import doctest
import re
from dataclasses import replace

import pytest

from benchmarks import reproduce
from benchmarks.harness.figures import load
from dpcore.__main__ import main
from dpcore.tools.compare import bench
from dpcore.tools.ratios import Estimate
from dpcore.tools.records import ROOT


def claims():
    steps, sums = load("first_screen"), load("all_reduce")
    return [*reproduce.claims_of_steps(steps), *reproduce.claims_of_all_reduce(sums)]


def test_the_claims_are_those_of_the_readme():
    found = {claim.what: claim.ratio for claim in claims()}
    assert len(found) == 6 + 4 * 3
    step = found["a step, a host, MLP, 42 M"]
    (row,) = re.findall(r"^\| a host \| MLP.*$", (ROOT / "README.md").read_text(), re.M)
    assert step.high < 1 and f"| {step.median:.2f} (" in row
    assert found["all-reduce of 1 MiB, Gloo"].high < 0.1


def test_they_hold_where_they_were_measured_and_fail_where_others_are_ahead():
    known = claims()
    lines, failed = reproduce.judged(known, known)
    assert failed == 0 and len(lines) == len(known)
    assert {line.split()[0] for line in lines} <= {"holds", "open"}
    slower = [replace(one, ratio=Estimate(1.5, 1.4, 1.6, 9, 0.95)) for one in known]
    lines, failed = reproduce.judged(known, slower[:-1])
    assert failed == sum(line.startswith("fails") for line in lines) >= len(known) - 5
    assert lines[-1].startswith("not tried")


def test_the_verdicts():
    assert doctest.testmod(reproduce).failed == 0


def test_it_needs_the_clone(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    assert main(["bench", "--reproduce"]) == 2
    assert "are in the repository and not in an installed package" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--world", "2"], ["--op", "max"]])
def test_it_takes_no_other_option(option, capsys):
    assert main(["bench", "--reproduce", *option]) == 2
    assert f"leave out {option[0]}" in capsys.readouterr().err
