"""tools/gpu_check.py: its parts, the file with what was found, and what it says at the end."""

import json
import sys
import time

import pytest
import torch

from tools import gpu_check, gpu_machine

ROW = {"section": "step gpt2", "what": "step", "contender": "dpcore", "target_of_torch": 0.95}
MISS = ROW | {"of_torch": 1.03, "reached": False}
COPY = {"section": "flatten 4096", "what": "unflatten", "target_of_copy": 0.85}
NOTHING = {
    "tests": {},
    "failures": {},
    "results": [],
    "missing": {"needed": [], "helpful": [], "install": ""},
    "compute_sanitizer": {"path": None, "outcome": "not found"},
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The exit status of a run with these options, and what its file holds."""

    def call(*options):
        out = tmp_path / "gpu.json"
        command = ["gpu_check", "--out", str(out), "--folder", str(tmp_path / "logs")]
        monkeypatch.setattr(sys, "argv", [*command, *options])
        return gpu_check.main(), json.loads(out.read_text())

    return call


def writes(monkeypatch, found):
    """In the place of figures."""

    def figures(path, ends_at):
        path.write_text(json.dumps(found))
        return ""

    monkeypatch.setattr(gpu_check, "run_figures", figures)
    monkeypatch.setattr(gpu_check, "STAGES", [])


# ---- the whole -------------------------------------------------------------------------------


def test_the_parts_are_put_together(tmp_path, run):
    (tmp_path / "test_it.py").write_text("def test_right(): pass\n")
    status, found = run("--files", str(tmp_path / "test_it.py"))
    assert status == 0
    (tests,) = found["tests"].values()
    assert tests["passed"] == 1
    assert found["driver_release"] == gpu_machine.driver_release()
    assert found["compute_sanitizer"] == {"path": None, "outcome": "not tried"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="would build for this machine's GPU")
def test_a_build_that_fails_ends_it(run, capsys):
    status, found = run("--build")
    assert status == 1 and found["tests"] == {}
    assert found["failures"]["build"].startswith("torch sees no GPU: ")
    assert found["build_seconds"] > 0
    assert "torch sees no GPU: " in capsys.readouterr().err


@pytest.mark.hurried
def test_tests_have_what_the_build_has_left(run, monkeypatch):
    began = time.monotonic()
    heard = {}

    def until(name, answer=None):
        def call(*arguments):
            heard[name] = arguments[-1] - began
            return answer

        return call

    monkeypatch.setattr(gpu_machine, "build", lambda log: time.sleep(1.0) or "")
    monkeypatch.setattr(gpu_machine, "find_tool", lambda name: "/somewhere/" + name)
    monkeypatch.setattr(gpu_check, "STAGES", [(["tests/one.py"], 0.5)])
    monkeypatch.setattr(gpu_check.Check, "run_tests", until("tests"))
    monkeypatch.setattr(gpu_check, "run_figures", until("figures", ""))
    nothing = ({"outcome": "3 passed"}, {})
    monkeypatch.setattr(gpu_check, "run_sanitizer", until("sanitizer", nothing))
    status, found = run("--build", "--seconds", "101")
    assert status == 0 and 1.0 <= found["build_seconds"] < 20
    left = 101 - found["build_seconds"]
    assert heard["tests"] == pytest.approx(101 - left / 2, abs=1)
    assert heard["figures"] == pytest.approx(101 - left * (1 - gpu_check.FIGURES_UNTIL), abs=1)
    assert heard["sanitizer"] == pytest.approx(101, abs=1)


@pytest.mark.hurried
def test_every_stage_has_time_to_begin(run, monkeypatch):
    monkeypatch.setattr(gpu_machine, "find_tool", lambda name: None)
    writes(monkeypatch, {"failures": {}, "results": []})
    monkeypatch.setattr(gpu_check, "STAGES", [(["tests/one.py"], 0.01), (["tests/two.py"], 0.02)])
    heard = []
    monkeypatch.setattr(
        gpu_check.Check,
        "run_tests",
        lambda self, names, ends_at: heard.append(ends_at - time.monotonic()),
    )
    run("--seconds", "100")
    assert heard == [pytest.approx(30, abs=1)] * 2


# ---- what it says ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "status", "said"),
    [
        ({}, 0, ""),
        ({"results": [ROW | {"of_torch": 0.9, "reached": True}, {"what": "copy"}]}, 0, ""),
        (
            {"results": [MISS]},
            2,
            "missed: step gpt2: dpcore has 1.030 of torch's time, the target is at most 0.95",
        ),
        (
            {"results": [COPY | {"of_copy": 0.5, "reached": False}]},
            2,
            "missed: flatten 4096: unflatten has 0.500 of a copy's rate, the target is at least "
            "0.85",
        ),
        (
            {"failures": {"step gpt2": "step gpt2: took 0 launches"}, "results": [MISS]},
            1,
            "step gpt2: took 0 launches\nmissed: step gpt2: dpcore has 1.030",
        ),
        (
            {"results": [MISS | {"wrong": "took 0"}], "failures": {"x": "x: took 0"}},
            1,
            "x: took 0",
        ),
        (
            {"compute_sanitizer": {"outcome": "no time was left: 3 s for each tool"}},
            1,
            "compute-sanitizer: no time was left: 3 s for each tool",
        ),
        (
            {"missing": {"needed": ["numpy"], "install": "python -m pip install numpy"}},
            1,
            "needed: python -m pip install numpy",
        ),
    ],
)
def test_the_exit_status_and_why(found, status, said, capsys):
    assert gpu_check.verdict(NOTHING | found) == status
    assert capsys.readouterr().err.startswith(said)
    if not said:
        assert capsys.readouterr().err == ""


@pytest.mark.parametrize("kind", ["failed", "hung_or_crashed", "cut_off"])
def test_tests_that_went_wrong_are_named_at_the_end(kind, capsys):
    of = {"failed": {}, "hung_or_crashed": {}, "cut_off": False}
    of[kind] = True if kind == "cut_off" else {"a.py::test_wrong": "assert 1 == 2"}
    assert gpu_check.verdict(NOTHING | {"tests": {"a.py": of}}) == 1
    said = "a.py: its time was over" if kind == "cut_off" else "a.py::test_wrong"
    assert capsys.readouterr().err == said + "\n"


def test_missed_targets_of_a_run_are_printed(run, monkeypatch, capsys):
    monkeypatch.setattr(gpu_machine, "find_tool", lambda name: None)
    writes(monkeypatch, {"gpu": "a GPU", "failures": {}, "results": [MISS]})
    status, found = run()
    assert status == 2 and found["gpu"] == "a GPU" and found["results"] == [MISS]
    assert capsys.readouterr().err.splitlines()[-1].startswith("missed: step gpt2: dpcore has 1.03")


def test_failures_of_figures_are_kept(run, monkeypatch):
    monkeypatch.setattr(gpu_machine, "find_tool", lambda name: None)
    writes(monkeypatch, {"failures": {"copy": "copy: no"}, "results": []})
    status, found = run()
    assert status == 1 and found["failures"] == {"copy": "copy: no"}


def test_without_pytest_there_are_figures(run, monkeypatch, capsys):
    there = gpu_machine.is_there
    monkeypatch.setattr(
        gpu_machine, "is_there", lambda module: module != "pytest" and there(module)
    )
    monkeypatch.setattr(gpu_machine, "find_tool", lambda name: "/somewhere/" + name)
    writes(monkeypatch, {"failures": {}, "results": [ROW | {"of_torch": 0.9, "reached": True}]})
    monkeypatch.setattr(gpu_check, "STAGES", [(["tests/test_docs.py"], 0.5)])
    status, found = run()
    assert status == 1 and found["tests"] == {} and len(found["results"]) == 1
    assert found["compute_sanitizer"]["outcome"] == "not run: its tests need pytest"
    assert found["missing"]["needed"] == ["pytest>=8"]
    said = capsys.readouterr().err
    assert said.startswith("missing here: python -m pip install") and '"pytest>=8"' in said
    assert said.splitlines()[-1].startswith("needed: python -m pip install")


# ---- compute-sanitizer -----------------------------------------------------------------------


def test_without_compute_sanitizer_it_says_so(run, monkeypatch, capsys):
    monkeypatch.setattr(gpu_machine, "find_tool", lambda name: None)
    writes(monkeypatch, {"failures": {}, "results": []})
    heard = []
    figures = gpu_check.run_figures
    monkeypatch.setattr(
        gpu_check, "run_figures", lambda path, at: heard.append(at) or figures(path, at)
    )
    began = time.monotonic()
    status, found = run("--seconds", "100")
    assert heard[0] - began > 90, "figures have its time"
    assert status == 0 and found["compute_sanitizer"]["path"] is None
    assert found["compute_sanitizer"]["outcome"].startswith("not found: compute-sanitizer is neit")
    assert "compute-sanitizer: not found" in capsys.readouterr().out


def test_without_time_for_compute_sanitizer_it_says_so(run, monkeypatch):
    monkeypatch.setattr(gpu_machine, "find_tool", lambda name: "/somewhere/" + name)
    writes(monkeypatch, {"failures": {}, "results": []})
    status, found = run("--seconds", "30")
    assert status == 1
    assert found["compute_sanitizer"]["path"] == "/somewhere/compute-sanitizer"
    assert found["compute_sanitizer"]["outcome"].startswith("no time was left: ")


def test_what_compute_sanitizer_has_found_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_machine, "find_tool", lambda name: "/somewhere/" + name)
    (tmp_path / "test_it.py").write_text(
        "import os, pytest\n"
        "def test_each_has_its_part(): assert 20 <= int(os.environ['DPCORE_SANITIZER_SECONDS'])\n"
        "def test_wrong(): assert 0\n"
        "def test_left_out(): pytest.skip('Device not supported')\n"
    )
    monkeypatch.setattr(gpu_check, "LAST", str(tmp_path / "test_it.py"))
    of_it, tests = gpu_check.run_sanitizer(tmp_path, time.monotonic() + 300)
    assert of_it["outcome"] == "1 passed, 1 failed, 1 skipped (Device not supported)"
    assert of_it["seconds_each"] in (97, 98) and len(tests["failed"]) == 1
