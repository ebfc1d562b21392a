"""dpcore show --csv and --export kineto: what other programs read."""

import csv
import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dpcore.__main__ import main
from dpcore.tools.flight_recorder import NAMES, Called, write_dumps
from dpcore.tools.show import figures_of, read_run
from dpcore.tools.show.reading import read_runs
from dpcore.tools.show.rows import COLUMNS
from tests.ranks import python

from .profiles import GLOO
from .traces import write_trace

ROOT = Path(__file__).resolve().parents[2]


def rows_of(path):
    with path.open() as lines:
        return list(csv.DictReader(lines))


@pytest.mark.parametrize(
    "outputs, said",
    [
        (["--html", "run.json"], "run.json is read here"),
        (["--csv", "run.json"], "run.json is read here"),
        (["--png", "../here/run.json"], "run.json is read here"),
        (["--html", "z", "--csv", "z"], "two outputs go to"),
    ],
)
def test_nothing_that_is_read_or_written_is_overwritten(
    tmp_path, monkeypatch, capsys, outputs, said
):
    folder = tmp_path / "here"
    folder.mkdir()
    path = write_trace(folder / "run.json")
    before = path.read_bytes()
    monkeypatch.chdir(folder)
    assert main(["show", "run.json", *outputs]) == 2
    assert said in capsys.readouterr().err
    assert path.read_bytes() == before and list(folder.iterdir()) == [path]


def test_a_file_of_a_folder_that_is_read_is_not_overwritten(tmp_path, capsys):
    path = write_trace(tmp_path / "run.json")
    assert main(["show", str(tmp_path), "--csv", str(path)]) == 2
    assert "is read here" in capsys.readouterr().err


def test_a_full_device_is_named(tmp_path, capsys):
    path = write_trace(tmp_path / "run.json")
    assert main(["show", str(path), "--csv", "/dev/full"]) == 1
    assert capsys.readouterr().err == "dpcore show: /dev/full: No space left on device\n"


def test_signs_that_an_output_does_not_know_are_replaced(tmp_path):
    path = write_trace(tmp_path / "run.json")
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "dpcore", "show", str(path)]
    out = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert (out.returncode, out.stderr) == (0, "") and "bucket" in out.stdout


def test_a_row_per_step_rank_and_bucket(tmp_path):
    told = {"link": "1gbit,50us", "commit": "abc123"}
    path = write_trace(tmp_path / "run.json", steps=3, **told)
    assert main(["show", str(path), "--csv", str(tmp_path / "rows.csv")]) == 0
    rows = rows_of(tmp_path / "rows.csv")
    assert list(rows[0]) == list(COLUMNS)
    keys = [(row["rank"], row["step"], row["bucket"]) for row in rows]
    assert keys == [(r, s, b) for r in "01" for s in "123" for b in "01"]
    first, second = rows[:2]
    same = ("run", "schedule", "link", "transport", "world", "commit")
    assert [first[name] for name in same] == [
        "run", "bucketed", "1gbit,50us", "tcp", "2", "abc123"
    ]  # fmt: skip
    times = ("begin_ms", "filling_ms", "not_sent_ms", "in_flight_ms", "exposed_ms", "step_ms")
    assert [float(first[name]) for name in times] == pytest.approx([8, 2, 0, 5, 1, 20])
    assert float(second["exposed_ms"]) == pytest.approx(3)
    assert float(first["step_exposed_ms"]) == pytest.approx(4)
    assert first["parameters"] == "layer0.weight, layer0.bias"
    assert not (tmp_path / "run.html").exists()


def test_rows_of_several_runs_and_of_torch(tmp_path, capsys):
    path = write_trace(tmp_path / "run.json", steps=2)
    assert main(["show", str(path), *map(str, GLOO), "--csv", "-"]) == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert {row["run"] for row in rows} == {"run", "gloo"}
    of_torch = [row for row in rows if row["run"] == "gloo"]
    assert len(of_torch) == 2 * 3 * 3
    assert {row["transport"] for row in of_torch} == {"gloo"}
    for row in of_torch:
        assert float(row["exposed_ms"]) <= float(row["step_exposed_ms"]) < float(row["step_ms"])


def test_the_columns_are_documented_where_they_are_asked_for(capsys):
    with pytest.raises(SystemExit):
        main(["show", "--help"])
    out = capsys.readouterr().out
    page = (ROOT / "docs" / "show.md").read_text()
    for name, meaning in COLUMNS.items():
        assert f"  {name:<16} {meaning}\n" in out
        assert f"| `{name}` | {meaning} |\n" in page


# ---- kineto --------------------------------------------------------------------------------------


def exported(path):
    assert main(["show", str(path), "--export", "kineto"]) == 0
    return sorted(path.with_suffix(".kineto").iterdir())


def test_a_file_per_rank_with_correlated_launches(tmp_path):
    files = exported(write_trace(tmp_path / "run.json", steps=3))
    assert [file.name for file in files] == ["rank0.pt.trace.json", "rank1.pt.trace.json"]
    for rank, file in enumerate(files):
        assert f'"rank": {rank},' in file.read_text()  # a text that HTA looks for
        content = json.loads(file.read_text())
        info = {"backend": "nccl", "rank": rank, "world_size": 2}
        assert content["distributedInfo"] == info
        events = [e for e in content["traceEvents"] if e["ph"] == "X"]
        kernels = [e for e in events if e["cat"] == "kernel"]
        launches = [e for e in events if e["cat"] == "cuda_runtime"]
        numbers = [e["args"]["correlation"] for e in kernels]
        assert numbers == [e["args"]["correlation"] for e in launches]
        assert len(set(numbers)) == len(numbers) and min(numbers) > 1 << 16
        sent = [e for e in kernels if e["name"] == "ncclDevKernel_AllReduce"]
        assert len(sent) == 6 and not {e["args"]["stream"] for e in sent} & {7}
        assert {e["args"]["stream"] for e in kernels} - {7} == {e["args"]["stream"] for e in sent}
        steps = [e["name"] for e in events if e["name"].startswith("ProfilerStep#")]
        assert steps == ["ProfilerStep#0", "ProfilerStep#1", "ProfilerStep#2"]


@pytest.mark.parametrize("make", ["ours", "torch"])
def test_overlap_survives(tmp_path, make):
    """What is read back is on streams of a GPU, and has the overlap that was written."""
    if make == "ours":
        path = write_trace(tmp_path / "run.json", late=1.0)
        run, files = read_run(path), exported(path)
    else:
        (run,) = read_runs(GLOO)
        from dpcore.tools.show.kineto import export

        files = export(run, tmp_path / "gloo.kineto")
    (again,) = read_runs(files)
    before, after = figures_of(run), figures_of(again)
    for one, other in zip(before.ranks, after.ranks, strict=True):
        assert other.overlap == pytest.approx(one.overlap, abs=0.001)
        assert other.communication_ms == pytest.approx(one.communication_ms, rel=0.001)


def test_a_file_where_the_folder_would_be(tmp_path, capsys):
    path = write_trace(tmp_path / "run.json")
    (tmp_path / "run.kineto").write_text("mine")
    assert main(["show", str(path), "--export", "kineto"]) == 2
    assert "is in the way" in capsys.readouterr().err
    assert (tmp_path / "run.kineto").read_text() == "mine"


# ---- torch's flight recorder ---------------------------------------------------------------------


def analysed(folder):
    """What torch's own analyser finds: collectives of all ranks, and what it says."""
    command = ["-m", "torch.distributed.flight_recorder.fr_trace", folder, "-o", "db"]
    run = python.run(*command, capture_output=True, text=True, timeout=120, cwd=folder.parent)
    assert run.returncode == 0, run.stderr
    _, found = pickle.loads((folder.parent / "db").read_bytes())
    return found.collectives, run.stdout + run.stderr


def test_torchs_analyser_reads_a_trace(tmp_path):
    path = write_trace(tmp_path / "run.json", steps=3)
    assert main(["show", str(path), "--export", "flight-recorder"]) == 0
    found, _ = analysed(tmp_path / "run.flight-recorder")
    assert [one.collective_name for one in found] == ["gloo:all_reduce"] * 6
    assert all(one.pass_check and one.expected_ranks == {0, 1} for one in found)


def calls(numbers, group=0, name="all_reduce", nbytes=64, hangs=()):
    return [
        Called(group, n, name, "float32", nbytes, 1000 * n, None if n in hangs else 1000 * n + 500)
        for n in numbers
    ]


def test_torchs_analyser_names_the_rank_that_is_missing(tmp_path):
    by_rank = {rank: calls(range(8), hangs=[7]) for rank in range(3)}
    # Its ring has lost the oldest, it has not called number 7, and its times are rounded.
    by_rank[1] = [replace(one, begin_ns=5000 - one.number) for one in calls(range(5, 7))]
    write_dumps(tmp_path / "dump", by_rank, {0: range(3)})
    found, said = analysed(tmp_path / "dump")
    assert [one.collective_seq_id for one in found] == [5, 6, 7]
    assert [one.missing_ranks for one in found] == [None, None, {1}]
    assert "Not all ranks joining collective, sequence number: 7" in said


def test_torchs_analyser_names_what_differs(tmp_path):
    others = {
        "SIZE_OR_SYNTAX_MISMATCH": {"nbytes": 128},
        "COLLECTIVE_TYPE_MISMATCH": {"name": "reduce"},
        "COLLECTIVE_STATE_MISMATCH": {"hangs": [1]},
    }
    by_rank = {0: [], 1: []}
    for group, other in enumerate(others.values()):
        by_rank[0] += calls([0, 1], group)
        by_rank[1] += calls([0], group) + calls([1], group, **other)
    write_dumps(tmp_path / "dump", by_rank, {group: range(2) for group in range(len(others))})
    found, said = analysed(tmp_path / "dump")
    assert sorted((one.group_id, one.pass_check) for one in found) == [
        (str(group), passes) for group in range(len(others)) for passes in (False, True)
    ]
    for state in others:
        assert f"Culprit rank 1; Error type: {state}" in said


def test_torchs_analyser_knows_every_collective_also_of_groups(tmp_path):
    by_rank = {
        rank: [one for n, name in enumerate(NAMES) for one in calls([n], name=name)]
        for rank in range(4)
    }
    for rank in (1, 3):
        by_rank[rank] += [one for n, name in enumerate(NAMES) for one in calls([n], 9, name)]
    write_dumps(tmp_path / "dump", by_rank, {0: range(4), 9: [1, 3]})
    found, _ = analysed(tmp_path / "dump")
    assert all(one.pass_check for one in found)
    assert sorted(len(one.expected_ranks) for one in found) == [2] * len(NAMES) + [4] * len(NAMES)
