"""The README tells the truth: its code runs, its commands exist, its figures are committed."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import readme
from benchmarks.harness.figures import source
from tests.ranks import python

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
ACTIVATE = Path(sys.prefix) / "bin" / "activate"
in_an_environment = pytest.mark.skipif(
    not ACTIVATE.exists(), reason=f"there is no {ACTIVATE}: this Python is in no environment"
)


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def commands():
    lines = "".join(blocks("bash")).splitlines()
    return [line.split("  #")[0].strip() for line in lines if line.strip()]


def as_a_reader(command, folder=ROOT, limit=180):
    """In a shell that knows nothing of the environment until it is activated, as the page says. The
    environment is the one that the tests run in, which need not be .venv; its Python is forked."""
    there = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    own = str(Path(sys.executable).parent)
    there["PATH"] = os.pathsep.join(p for p in there["PATH"].split(os.pathsep) if p != own)
    forked = f"PATH={shlex.quote(str(python.folder()))}:$PATH"
    return subprocess.run(
        ["bash", "-c", f"source {shlex.quote(str(ACTIVATE))} && {forked} && {command}"],
        capture_output=True, text=True, timeout=limit, env=there, cwd=folder,
    )  # fmt: skip


@in_an_environment
@pytest.mark.parametrize(("number", "printed"), ((1, "1.5 [0.0, 1.0, 2.0, 3.0]"), (0, "native")))
def test_the_code_runs(tmp_path, number, printed):
    code = blocks("python")[number]
    script = tmp_path / "first_screen.py"
    script.write_text(code)
    # Unbuffered, as torchrun starts Python, the lines of two ranks would mix: a file for each.
    said = ["--log-dir", str(tmp_path / "said"), "--redirects", "1"]
    launch = ["torchrun", "--standalone", "--nproc-per-node", "2", *said, str(script)]
    run = as_a_reader(shlex.join(launch))
    assert run.returncode == 0, run.stderr
    outputs = [path.read_text() for path in (tmp_path / "said").rglob("stdout.log")]
    assert [output.count(printed) for output in outputs] == [1, 1]
    code_lines = [line for line in code.splitlines() if line.strip()]
    assert len(code_lines) <= 12


@in_an_environment
def test_what_the_recipe_has_trained_can_be_traced(tmp_path):
    """The two snippets in a row: the recipe names no communicator, and neither does the trace."""
    recipe = blocks("python")[0]
    snippet = re.search(r"`(with dp\.trace\(\"run\.json\"\):)`", TEXT)[1]
    train = next(line for line in recipe.splitlines() if "backward()" in line).split("#")[0]
    script = tmp_path / "in_a_row.py"
    script.write_text(f"{recipe}\nimport dpcore as dp\n{snippet}\n    {train}\n")
    launch = ["torchrun", "--standalone", "--nproc-per-node", "2", str(script)]
    run = as_a_reader(f"cd {shlex.quote(str(tmp_path))} && {shlex.join(launch)}")
    assert run.returncode == 0, run.stderr
    found = json.loads((tmp_path / "run.json").read_text())
    assert found["distributedInfo"]["world_size"] == 2
    assert [model["name"] for model in found["otherData"]["models"]] == ["model 1 (Linear)"]


def test_every_block_of_code_is_run():
    assert len(blocks("python")) == 2


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith("make")])
def test_make_targets_exist(command):
    target = shlex.split(command)[1]
    run = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


ACTIVATION = "source .venv/bin/activate"
FIRST = [line.split("  #")[0] for line in blocks("bash")[0].splitlines()]
RUNNABLE = [
    c for c in commands() if not c.startswith(("make", "pip")) and c not in (ACTIVATION, *FIRST)
]
FEWER_ROUNDS = {"dpcore demo": " --rounds 1 --steps 2", "dpcore compare": " --rounds 3"}


@in_an_environment
@pytest.mark.parametrize("command", FIRST)
def test_the_first_commands_run_where_the_readers_script_and_model_are(
    command, tmp_path, monkeypatch
):
    """With fewer rounds and steps, which the first test of a machine with two cores can't spare."""
    python.run_first(monkeypatch, python.SETTLES_SOON)
    (tmp_path / "train.py").write_text(blocks("python")[0])
    example = (ROOT / "docs" / "compare.md").read_text().split("```python\n")[1].split("```")[0]
    (tmp_path / "my.py").write_text(example)
    fewer = next((more for begin, more in FEWER_ROUNDS.items() if command.startswith(begin)), "")
    run = as_a_reader(command + fewer, tmp_path)
    assert run.returncode == 0, run.stderr
    assert any(tmp_path.rglob("*.html")), run.stdout


def test_the_first_screen_has_three_commands_and_one_picture():
    assert len(FIRST) == 3
    first = TEXT.split("## Train")[0]
    assert len(re.findall(r"!\[", first)) == 1
    assert len(first.splitlines()) <= 40


@in_an_environment
def test_the_environment_has_the_command():
    """The others are run by copies of its commands, in processes that are forked."""
    run = subprocess.run([ACTIVATE.with_name("dpcore"), "--version"], capture_output=True)
    assert run.returncode == 0, run.stderr
    assert ACTIVATE.with_name("torchrun").exists()


@in_an_environment
@pytest.mark.parametrize("command", RUNNABLE)
def test_commands_run(command):
    run = as_a_reader(command)
    assert run.returncode == 0, run.stderr


def test_the_environment_is_activated_before_anything_of_it_is_used():
    lines = commands()
    assert lines.count(ACTIVATION) == 1
    assert len(RUNNABLE) >= 3
    assert lines.index(ACTIVATION) < min(lines.index(command) for command in RUNNABLE)


def test_what_the_first_make_takes_is_said(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import environment

    assert f"downloads torch {environment.TORCH.rpartition('.')[0]}" in TEXT
    # Both before the first command that would download.
    for needed in ("python3-venv", "PIP_EXTRA_INDEX_URL"):
        assert TEXT.index(needed) < TEXT.index("make demo ")


def test_every_command_is_of_a_tested_kind():
    assert len(commands()) >= 6
    assert [c for c in commands() if c.startswith("pip")] == ["pip install --no-build-isolation ."]


@pytest.mark.parametrize("name", readme.DOCUMENTS)
def test_figures_are_those_of_the_committed_results(name):
    text = (readme.ROOT / name).read_text()
    assert set(re.findall(r"<!-- figures: (\w+) -->", text)) == set(readme.DOCUMENTS[name])
    assert readme.rendered(name, text) == text


def test_a_commit_with_changes_is_shown_as_one():
    record = {"machine": {"cores": 2, "cpu": "X"}, "date": "2026-11-22T00:00", "commit": "a" * 12}
    assert f"commit {'a' * 10})" in source("x", [record])
    record["commit"] += "+"
    assert f"commit {'a' * 10}+, with uncommitted changes)" in source("x", [record])


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        if not target.startswith("http"):
            assert (ROOT / target).exists(), target
