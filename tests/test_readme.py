"""The README tells the truth: its code runs, its commands exist, its figures are committed."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import readme

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BIN = Path(sys.executable).parent
ENVIRONMENT = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def commands():
    lines = "".join(blocks("bash")).splitlines()
    return [line.split("  #")[0].strip() for line in lines if line.strip()]


@pytest.mark.parametrize(("number", "printed"), ((0, "1.5 [0.0, 1.0, 2.0, 3.0]"), (1, "native")))
def test_the_code_of_the_first_screen_runs(tmp_path, number, printed):
    code = blocks("python")[number]
    script = tmp_path / "first_screen.py"
    script.write_text(code)
    # Unbuffered, as torchrun starts Python, the lines of two ranks would mix: a file for each.
    said = ["--log-dir", tmp_path / "said", "--redirects", "1"]
    launch = [BIN / "torchrun", "--standalone", "--nproc-per-node", "2", *said, script]
    run = subprocess.run(
        launch, capture_output=True, text=True, timeout=120, env=ENVIRONMENT, cwd=ROOT
    )
    assert run.returncode == 0, run.stderr
    outputs = [path.read_text() for path in (tmp_path / "said").rglob("stdout.log")]
    assert [output.count(printed) for output in outputs] == [1, 1]
    code_lines = [line for line in code.splitlines() if line.strip()]
    assert len(code_lines) <= 12


def test_every_block_of_code_is_run():
    assert len(blocks("python")) == 2


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith("make")])
def test_make_targets_exist(command):
    target = shlex.split(command)[1]
    run = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


RUNNABLE = [c for c in commands() if not c.startswith(("make", "pip"))]


@pytest.mark.parametrize("command", RUNNABLE)
def test_commands_run(command):
    run = subprocess.run(
        command, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=180, env=ENVIRONMENT
    )
    assert run.returncode == 0, run.stderr


def test_every_command_is_of_a_tested_kind():
    assert len(commands()) >= 6
    assert [c for c in commands() if c.startswith("pip")] == ["pip install --no-build-isolation ."]


def test_figures_are_those_of_the_committed_results():
    assert set(re.findall(r"<!-- figures: (\w+) -->", TEXT)) == set(readme.TABLES)
    assert readme.rendered(TEXT) == TEXT
    performance = readme.PERFORMANCE.read_text()
    assert set(re.findall(r"<!-- figures: (\w+) -->", performance)) == set(readme.MORE_TABLES)
    assert readme.rendered(performance) == performance


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", TEXT):
        if not target.startswith("http"):
            assert (ROOT / target).exists(), target
