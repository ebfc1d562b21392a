"""Odd files and odd arguments: every command takes them, or says in one line what is wrong."""

import json
import os

import pytest

from dpcore.base.files import write_whole
from dpcore.base.link import Speed
from dpcore.errors import Unsupported
from dpcore.tools.simulate import gradients_of, predict
from tests import odd_files
from tests.command_line import status_of
from tests.show.traces import write_trace

SIMULATE = ("--link", "1gbit,50us", "--schedule", "bucketed")
HOW = [
    lambda path: ("show", path, "--json"),
    lambda path: ("show", path, "--html", path.with_suffix(".html")),
    lambda path: ("show", path, "--csv", "-"),
    lambda path: ("show", path, "--export", "kineto"),
    lambda path: ("simulate", path, *SIMULATE),
]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def line_of(capsys, *arguments):
    """What the command says on one line where it refuses, else nothing."""
    status = status_of(*arguments)
    said = capsys.readouterr().err.splitlines()
    assert (status, len(said)) in ((0, 0), (2, 1)), (arguments, status, said)
    assert not said or said[0].startswith(f"dpcore {arguments[0]}: "), said
    return said[0] if said else ""


def contents(tmp_path):
    folder = tmp_path / "good"
    folder.mkdir()
    return odd_files.good_contents(folder)


def test_files_that_are_odd_as_a_whole(tmp_path, capsys):
    files = odd_files.raw_files(contents(tmp_path)["trace"])
    assert len(files) > 55
    refused = 0
    for number, (name, data) in enumerate(files):
        path = tmp_path / "odd.json"
        path.write_bytes(data)
        for how in (HOW[0], HOW[4], HOW[number % len(HOW)]):
            line = line_of(capsys, *how(path))
            assert str(path) in line or name == "not so deep"
            refused += bool(line)
    assert refused > 3 * 55


def test_a_field_of_another_kind_is_named(tmp_path, capsys):
    """Each field of an event and of what a file says beside events, with each odd value."""
    refused = 0
    for number, (place, content) in enumerate(
        odd_files.changed_fields(contents(tmp_path)["trace"])
    ):
        if number % 3:  # a third of them, and each field with several values
            continue
        path = tmp_path / "odd.json"
        path.write_bytes(odd_files.written(content))
        line = line_of(capsys, *HOW[number % len(HOW)](path))
        field = place.partition(" ")[0].rpartition(".")[2]
        assert not line or field in line or "otherData" in place, (place, line)
        refused += bool(line)
    assert refused > 40


@pytest.mark.parametrize("kind", ["trace", "gpu", "gloo", "description"])
def test_random_changes_of_good_files(kind, tmp_path, capsys):
    good = contents(tmp_path)[kind]
    ends = set()
    for seed in range(40):
        path = tmp_path / "odd.json"
        path.write_bytes(odd_files.written(odd_files.mutated(good, seed)))
        for how in (HOW[4], HOW[seed % 4]):
            ends.add(bool(line_of(capsys, *how(path))))
    assert ends == {True, False}


def test_what_is_no_regular_file(tmp_path, capsys):
    paths = odd_files.special_paths(tmp_path)
    for path in paths:
        assert line_of(capsys, "show", path, "--json"), path
        assert line_of(capsys, "simulate", path, *SIMULATE), path


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"ts": float("inf")}, r"].ts is Infinity; it must be microseconds, 0 or more"),
        ({"pid": -1}, "].pid is -1; it must be a whole number, at least 0"),
        ({"dur": "long"}, '].dur is "long"; it must be microseconds'),
        ({"args": {"bytes": 1.5}}, "].args.bytes is 1.5; it must be a whole number"),
        ({"name": None}, "].name is null; it must be a text"),
    ],
)
def test_the_entry_and_the_field_are_named(change, says, tmp_path, capsys):
    path = write_trace(tmp_path / "run.json", steps=1)
    content = json.loads(path.read_text())
    events = content["traceEvents"]
    number = next(n for n, event in enumerate(events) if event.get("cat") == "operation")
    events[number].update(change)
    path.write_bytes(odd_files.written(content))
    for command in (["show", path], ["simulate", path, *SIMULATE]):
        assert f"{path}: traceEvents[{number}{says}" in line_of(capsys, *command)


# ---- folders -------------------------------------------------------------------------------------


def test_a_folder_may_hold_other_json(tmp_path, capsys):
    folder = tmp_path / "runs"
    folder.mkdir()
    write_trace(folder / "run.json")
    others = {
        "package.json": '{"a": 1}',
        "broken.json": "{",
        "empty.json": "",
        "deep.json": "[" * 9,
    }
    for name, text in others.items():
        (folder / name).write_text(text)
    (folder / "folder.json").mkdir()
    (folder / "link.json").symlink_to("nowhere")
    assert line_of(capsys, "show", folder, "--json") == ""
    assert gradients_of(folder).sizes == [512, 512, 1024, 1024]
    assert line_of(capsys, "simulate", folder, *SIMULATE) == ""
    (folder / "run.json").unlink()
    for command in (["show", folder], ["simulate", folder, *SIMULATE]):
        line = line_of(capsys, *command)
        assert "passed over: broken.json, deep.json, empty.json, folder.json, link.json and" in line


def test_half_a_trace_in_a_folder_is_not_passed_over(tmp_path, capsys):
    folder = tmp_path / "runs"
    folder.mkdir()
    data = write_trace(folder / "a.json").read_bytes()
    (folder / "b.json").write_bytes(data[: len(data) // 2])
    assert "b.json is not a trace: it was cut off" in line_of(capsys, "show", folder)


def test_several_files_of_one_run_can_be_simulated(tmp_path, capsys):
    a, b = write_trace(tmp_path / "a.json"), write_trace(tmp_path / "b.json")
    assert "a.json holds 2 runs; name the files of one" in line_of(
        capsys, "simulate", a, b, *SIMULATE
    )


# ---- arguments -----------------------------------------------------------------------------------

NO_COUNT = ["", "-3", "0", "1.5", "nan", "inf", "x", "9" * 30, "9" * 5000, "2,", "--x"]
NO_SECONDS = ["", "-1", "0", "nan", "inf", "-inf", "1e999", "x", "3600"]
NO_LINK = ["", "0gbit", "nangbit", "-1gbit", "1gbit,1gbit", "1gbit,2h", "1.2.3gbit", "gbit", "x,"]
NO_SIZES = ["", "0", "-8", "8:64:nan", "8:64:inf", "8:64:1", "8:64:0.5", "64:8", "8:1G:1B", "1e3",
            "1:2:3:4", "8,", "9" * 40]  # fmt: skip
NO_CAPS = [f"bucketed:{cap}" for cap in ("0", "-1", "inf", "nan", "1,,2", "x", "1e999")]
NO_NAMES = ["", ",", "x", "bucketed,,flat", "\0"]
RUN = "run.json"
OWN = "import dpcore\n\nclass A(dpcore.LaunchSchedule):\n"
ODD_ARGUMENTS = [
    (["show", RUN, "--png", "x.png", "--steps"], ["", "0", "-1", "2:1", "a:b", "1:2:3", "nan"]),
    (["show", "ring", "--world"], [*NO_COUNT, "1", "9", "1025"]),
    (["show", "ring", "--collective"], NO_NAMES),
    (["simulate", RUN, "--link"], [*NO_LINK, "none", "file:x"]),
    (["simulate", RUN, *SIMULATE, "--world"], NO_COUNT),
    (["simulate", RUN, *SIMULATE, "--algorithm"], NO_NAMES),
    (["simulate", RUN, *SIMULATE, "--schedule"], [*NO_NAMES, *NO_CAPS, "bucketed:auto"]),
    (["bench", "--world"], NO_COUNT),
    (["bench", "--seconds"], NO_SECONDS),
    (["bench", "--sizes"], NO_SIZES),
    (["bench", "--collective"], NO_NAMES),
    (["bench", "--dtype"], NO_NAMES),
    (["inspect"], [*NO_COUNT, "-1"]),
    (["compare", "--world"], [*NO_COUNT, "2,0"]),
    (["compare", "--rounds"], NO_COUNT),
    (["compare", "--seconds"], NO_SECONDS),
    (["compare", "--threads"], NO_COUNT),
    (["compare", "--link"], [*NO_LINK, "none,50us"]),
    (["compare", "--contenders"], ["", ",", "x", "torch:0", "torch:nan", "torch:.", "torch:1.2.3",
                                   "../own.py:A:0", "none.py:A"]),
    (["compare", "all_reduce", "--sizes"], NO_SIZES),
    (["demo", "--rounds"], NO_COUNT),
    (["demo", "--steps-per-round"], NO_COUNT),
]  # fmt: skip


@pytest.mark.parametrize(
    ("command", "values"), ODD_ARGUMENTS, ids=lambda value: "-".join(value)[:40]
)
def test_odd_arguments_are_refused(command, values, tmp_path, capsys):
    write_trace(tmp_path / RUN, steps=1)
    for value in values:
        assert line_of(capsys, *command, value), value


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("class A(:\n", "own.py:1: SyntaxError: invalid syntax"),
        ("x = 1\n1 / 0\n", "own.py:2: ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)", "own.py:1: SystemExit: 3"),
        ("A = 3", "own.py:A is a int; a dpcore.LaunchSchedule is needed"),
        ("class A:\n def listens_to(self): return 3", "own.py:A is a type; a dpcore.Launch"),
        (OWN + " def listens_to(self): return 3", "schedule 'A': TypeError: 'int' object"),
        (OWN + " def __init__(self, x): 0", "schedule 'A': TypeError: A.__init__() missing"),
        (OWN + " def caps(self, caps): return 1 / 0", "own.py:4: ZeroDivisionError"),
        (OWN + " def caps(self, caps): return None", "schedule 'A': TypeError"),
    ],
)
def test_mistakes_in_a_schedule_of_ones_own_are_one_line(text, says, tmp_path, capsys):
    write_trace(tmp_path / RUN, steps=1)
    (tmp_path / "own.py").write_text(text)
    line = line_of(capsys, "simulate", RUN, *SIMULATE, "--schedule", "own.py:A")
    assert says in line


def test_a_schedule_that_raises_says_where(tmp_path, capsys):
    write_trace(tmp_path / RUN, steps=1)
    (tmp_path / "own.py").write_text(OWN + " def backward_end(self, control):\n  return 1 / 0\n")
    line = line_of(capsys, "simulate", RUN, "--link", "1gbit", "--schedule", "own.py:A")
    assert "schedule 'A' in backward_end: own.py:5: ZeroDivisionError: division by zero" in line
    (tmp_path / "order.py").write_text(OWN + " def order(self, buckets):\n  return [0, 0]\n")
    assert status_of("simulate", RUN, "--link", "1gbit", "--schedule", "order.py:A") == 1
    assert "has an order() without each of" in capsys.readouterr().err


def test_show_of_code_of_ones_own(capsys):
    line = line_of(capsys, "show", "algos.py:swing")
    assert "there is no file algos.py" in line
    line = line_of(capsys, "show", "algos.py:swing", RUN)
    assert "algos.py:swing is an algorithm of your own, which is shown by itself" in line


# ---- what programs call --------------------------------------------------------------------------


def test_a_prediction_refuses_what_it_would_ignore(tmp_path):
    work = gradients_of(write_trace(tmp_path / RUN))
    for cap in (-1, float("nan"), float("inf")):
        with pytest.raises(Unsupported, match="a number from 0 on"):
            predict(work, Speed(1e9), bucket_cap_mb=cap)


def test_a_draft_is_never_named(tmp_path, capsys):
    """The file is written under another name first."""
    write_trace(tmp_path / RUN, steps=1)
    for path in (tmp_path / "no" / "such.html", "/proc/none.html"):
        with pytest.raises(OSError, match="") as caught:
            write_whole(path, "text")
        assert caught.value.filename == str(path)
        assert status_of("show", RUN, "--html", path) == 2
        said = capsys.readouterr().err
        assert str(path) in said and ".dpcore." not in said and len(said.splitlines()) == 1


def test_a_name_may_be_as_long_as_the_system_takes(tmp_path):
    path = tmp_path / ("x" * 255)
    write_whole(path, "text")
    assert path.read_text() == "text"
    assert os.listdir(tmp_path) == [path.name]
