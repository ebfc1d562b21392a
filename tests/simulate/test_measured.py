"""`dpcore simulate --measured` and `--csv`: steps of a comparison beside their predictions."""

import csv
import json

import pytest

from dpcore.__main__ import main
from dpcore.base.link import Speed, parse_speed
from dpcore.tools.compare.figures import figures_of
from dpcore.tools.compare.output import Outcome, records, write_jsonl
from dpcore.tools.compare.plan import Cell, contenders
from dpcore.tools.simulate.links import Links
from dpcore.tools.simulate.measured import COLUMNS, MEASURED_COLUMNS, read_measured
from tests.command_line import status_of
from tests.compare.test_figures import rounds

ENTRANTS = contenders(["torch", "bucketed:1", "bucketed:4", "dear:1", "local_sgd:4"])
STEP_MS = 150.0


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A described step of 90 ms, and what `dpcore compare` leaves of measured ones of 150 ms."""
    monkeypatch.chdir(tmp_path)
    gradients = [{"bytes": 1 << 20, "ready_ms": 10 * n} for n in range(1, 7)]
    described = {"forward_ms": 30, "backward_ms": 60, "gradients": gradients}
    (tmp_path / "run.json").write_text(json.dumps(described))
    made = rounds(lambda n: STEP_MS, lambda n: STEP_MS, alone=90.0)
    for one in made:
        for of in one.values():
            of.update({entrant.inner: of["dpcore"] for entrant in ENTRANTS})
    cells = (Cell("1gbit,50us", "emulated", 2), Cell("1gbit", "hosts", 4), Cell("", "machine", 2))
    outcomes = [Outcome(cell, figures_of(ENTRANTS, made), []) for cell in cells]
    write_jsonl(tmp_path / "compare.jsonl", records("mlp", {"commit": "abc"}, outcomes))
    return tmp_path


def rows(capsys, *arguments):
    asked = ["simulate", "run.json", *arguments, "--measured", "compare.jsonl", "--csv", "-"]
    assert main(asked) == 0
    return list(csv.DictReader(capsys.readouterr().out.splitlines()))


def test_an_error_stands_beside_what_was_measured_alike(folder, capsys):
    schedules = "bucketed:1,bucketed:4,bucketed:2,dear:1,local:4,zero1"
    found = rows(capsys, "--link", "1gbit,50us", "--schedule", schedules)
    assert tuple(found[0]) == (*COLUMNS, *MEASURED_COLUMNS)
    by_name = {(row["schedule"], row["cap_mb"]): row for row in found}
    for name in (("bucketed", "1"), ("bucketed", "4"), ("dear", "1")):
        row = by_name[name]
        assert float(row["measured_ms"]) == STEP_MS and float(row["alone_ms"]) == 90
        assert float(row["error"]) == pytest.approx(float(row["step_ms"]) / STEP_MS - 1, abs=1e-4)
    assert by_name["bucketed", "2"]["error"] == ""
    assert next(row for row in found if row["schedule"] == "zero1")["error"] == ""
    assert next(row for row in found if row["schedule"].startswith("local"))["error"] != ""


@pytest.mark.parametrize(
    ("asked", "fits"),
    [
        (["--link", "1gbit,50us", "--world", "2"], True),
        (["--link", "1gbit,60us", "--world", "2"], False),
        (["--link", "1gbit,50us", "--world", "4"], True),  # a shaped link has a rate alone
        (["--link", "1gbit,60us", "--world", "4"], True),
        (["--link", "100mbit", "--world", "4"], False),
        (["--link", "1gbit,50us", "--world", "3"], False),
        (["--intra", "10gbit,2us", "--inter", "1gbit,50us", "--world", "4", "--ranks-per-host",
          "2"], False),
    ],
)  # fmt: skip
def test_link_and_ranks_have_to_agree(folder, capsys, asked, fits):
    (row,) = rows(capsys, *asked, "--schedule", "bucketed:1")
    assert (row["error"] != "") == fits


def test_what_is_told_and_what_is_drawn(folder, capsys):
    asked = ["simulate", "run.json", "--link", "1gbit,50us", "--measured", "compare.jsonl"]
    schedules = ["--schedule", "bucketed:1,dear:1"]
    assert main([*asked, *schedules, "--html", "step.html"]) == 0
    said = capsys.readouterr().out
    assert "2 of 2 were measured in compare.jsonl." in said
    assert "measured" in said and "%" in said and "Computing alone" not in said
    text = (folder / "step.html").read_text()
    assert text.count("<svg") == 3
    assert text.count("<polyline") == 9  # two schedules and the bound in each
    for words in ("against bandwidth", "against ranks", "extrapolated", "dear, two_shot"):
        assert words in text
    # bucketed with two sizes and dear with one against size; both against bandwidth and ranks,
    # there also on four ranks of hosts of their own.
    assert text.count("<circle") == 3 + 2 + 4
    assert "bucketed, two_shot, measured: 150 ms" in text and "Dots: measured" in text
    described = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(described | {"forward_ms": 60}))
    assert main([*asked, "--schedule", "bucketed:1,flat"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "1 of 2 were measured" in said
    assert "Computing alone took 90.0 ms where they were measured, and 120 ms" in said
    (folder / "run.json").write_text(json.dumps(described | {"update_ms": 30}))
    assert main([*asked, "--schedule", "bucketed:1"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Computing alone took 90.0 ms where they were measured, and 120 ms" in said


def test_a_file_of_predictions_without_measurements(folder, capsys):
    asked = ["--link", "1gbit,100mbit", "--schedule", "flat", "--csv", "rows.csv"]
    assert main(["simulate", "run.json", *asked]) == 0
    found = list(csv.DictReader((folder / "rows.csv").open()))
    assert tuple(found[0]) == COLUMNS
    assert [(row["link"], row["schedule"]) for row in found] == [
        ("1gbit", "flat"),
        ("100mbit", "flat"),
    ]
    assert float(found[0]["step_ms"]) < float(found[1]["step_ms"])


def test_own_schedules_are_known_by_their_names(folder):
    line = json.loads((folder / "compare.jsonl").read_text().splitlines()[1])
    (folder / "own.jsonl").write_text(
        "".join(
            json.dumps(line | {"contender": name}) + "\n"
            for name in ("examples/slices.py:P3", "mine.py:Window:4", "diloco:8", "hook:fp16")
        )
    )
    found = read_measured(folder / "own.jsonl")
    assert [(one.name, one.cap_mb) for one in found[:3]] == [
        ("P3", None), ("Window", 4.0), ("local:8", None)
    ]  # fmt: skip
    assert found[0].is_over(Links.of(parse_speed("1gbit,50us")))
    assert not found[0].is_over(Links.of(Speed()))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "has no step over a link"),
        ("{", "compare.jsonl, line 1: this is no line of a comparison's compare.jsonl"),
        ("[]", "line 1: this is no line of a comparison's compare.jsonl: its content is a list"),
        ('{"contender": 1}', "contender is 1; it must be a text"),
        ("\x00\xff", "compare.jsonl"),
    ],
)
def test_what_is_no_comparison(folder, capsys, text, says):
    (folder / "compare.jsonl").write_bytes(text.encode("latin1"))
    asked = ["simulate", "run.json", "--link", "1gbit", "--measured", "compare.jsonl"]
    assert status_of(*asked) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (["--json", "--csv", "-"], "--json and --csv - both print"),
        (["--until", "0.9", "--csv", "a.csv"], "--csv is for predictions"),
        (["--measured", "none.jsonl"], "none.jsonl: No such file or directory"),
    ],
)
def test_mistakes(folder, capsys, asked, says):
    assert status_of("simulate", "run.json", "--link", "1gbit", *asked) == 2
    assert says in capsys.readouterr().err
