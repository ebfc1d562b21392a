"""The README tells the truth: its code runs, its commands exist, its figures are committed."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import first_screen, readme
from benchmarks.harness import first_screen_tables
from benchmarks.harness.figures import source
from tests.ranks import python

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
INSTALL = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
ACTIVATE = Path(sys.prefix) / "bin" / "activate"
in_an_environment = pytest.mark.skipif(
    not ACTIVATE.exists(), reason=f"there is no {ACTIVATE}: this Python is in no environment"
)


def blocks(language, text=TEXT):
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands(text):
    lines = "".join(blocks("bash", text)).splitlines()
    parts = [part for line in lines for part in line.partition("  #")[0].split(" && ")]
    return [part.strip() for part in parts if part.strip()]


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
    train = next(line for line in recipe.splitlines() if "backward()" in line).split("#")[0].strip()
    script = tmp_path / "in_a_row.py"
    script.write_text(f"{recipe}\nimport dpcore as dp\n{snippet}\n    {train}\n")
    launch = ["torchrun", "--standalone", "--nproc-per-node", "2", str(script)]
    run = as_a_reader(f"cd {shlex.quote(str(tmp_path))} && {shlex.join(launch)}")
    assert run.returncode == 0, run.stderr
    found = json.loads((tmp_path / "run.json").read_text())
    assert found["distributedInfo"]["world_size"] == 2
    assert [model["name"] for model in found["otherData"]["models"]] == ["model 1 (Sequential)"]


def test_every_block_of_code_is_run():
    assert len(blocks("python")) == 2


MAKES = [c for text in (TEXT, INSTALL) for c in commands(text) if c.startswith("make")]
FIRST = first_screen.commands()
FEWER_ROUNDS = {"dpcore demo": " --rounds 1 --steps-per-round 2", "dpcore compare": " --rounds 3"}
# Of the doors and of docs/install.md. The lines that install are run by tests of wheels and builds.
RUNNABLE = ["dpcore exercise start 1", "python examples/see_overlap.py", "dpcore doctor"]


@pytest.mark.parametrize("command", MAKES)
def test_make_targets_exist(command):
    target = shlex.split(command)[1]
    run = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@in_an_environment
@pytest.mark.parametrize("command", FIRST)
def test_the_first_commands_run_where_the_readers_script_and_model_are(
    command, tmp_path, monkeypatch
):
    """With fewer rounds and steps, which the first test of a machine with two cores can't spare."""
    python.run_first(monkeypatch, python.SETTLES_SOON)
    first_screen.files_of_a_reader(tmp_path)
    fewer = next((more for begin, more in FEWER_ROUNDS.items() if command.startswith(begin)), "")
    run = as_a_reader(command + fewer, tmp_path)
    assert run.returncode == 0, run.stderr
    assert any(tmp_path.rglob("*.html")), run.stdout
    assert first_screen_tables.excerpt(command, run.stdout)


def test_the_first_screen_has_the_command_and_one_picture():
    first = TEXT.split("## Three commands")[0]
    assert first.index("make demo") < first.index("![")
    assert len(first[: first.index("make demo")].splitlines()) <= 14
    assert len(re.findall(r"!\[", first)) == 1
    assert len(FIRST) == 3


def test_it_is_short():
    """Words of prose: without tables, code, what is generated and where links lead."""
    prose = re.sub(r"^```.*?^```|<!-- figures.*?<!-- end -->", "", TEXT, flags=re.M | re.S)
    prose = re.sub(r"\]\([^)]*\)", "]", re.sub(r"(?m)^\|.*$", "", prose))
    assert len(prose.split()) <= 950


@in_an_environment
def test_the_environment_has_the_command():
    """The others are run by copies of its commands, in processes that are forked."""
    run = subprocess.run([ACTIVATE.with_name("dpcore"), "--version"], capture_output=True)
    assert run.returncode == 0, run.stderr
    assert ACTIVATE.with_name("torchrun").exists()


@in_an_environment
@pytest.mark.parametrize("command", RUNNABLE)
def test_commands_run(command, tmp_path):
    assert command in TEXT + INSTALL
    run = as_a_reader(command.replace("examples/", f"{ROOT}/examples/"), tmp_path)
    assert run.returncode == 0, run.stderr


@in_an_environment
def test_a_clone_without_a_core_shows_an_algorithm(tmp_path):
    """As docs/install.md says of a clone in which nothing has been compiled."""
    assert "python -m dpcore show ring" in commands(INSTALL)
    package = shutil.ignore_patterns("_cores", "__pycache__")
    shutil.copytree(ROOT / "dpcore", tmp_path / "dpcore", ignore=package)
    run = as_a_reader("python -m dpcore show ring", tmp_path)
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "ring.html").exists()


def test_the_environment_is_activated_before_anything_of_it_is_used():
    assert TEXT.count("source .venv/bin/activate") == 1
    assert TEXT.index("source .venv/bin/activate") < TEXT.index("```bash\ndpcore")


def test_what_installing_takes_is_said(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import environment

    assert f"downloads torch {environment.TORCH.rpartition('.')[0]}" in INSTALL
    assert "python3-venv" in TEXT
    for needed in ("python3-venv", "PIP_EXTRA_INDEX_URL"):  # before what would download
        assert INSTALL.index(needed) < INSTALL.index("make test ")


def test_every_command_is_of_a_tested_kind():
    known = (
        *MAKES,
        *RUNNABLE,
        "python -m dpcore show ring",
        *(c for f in FIRST for c in f.split(" && ")),
    )
    of_install = ("git clone ", "cd ", "apt-get ", "pip install ")
    for command in (*commands(TEXT), *commands(INSTALL)):
        assert command in known or command.startswith(of_install), command


def test_every_door_has_a_command_and_a_page():
    doors = re.findall(r"^\| \*\*(I [\w ]+)\*\* \| (.+) \| (.+) \|$", TEXT, re.M)
    assert [door for door, *_ in doors] == [
        "I train", "I study overlap", "I teach or learn", "I compare",
    ]  # fmt: skip
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    assert re.findall("^## (.+)$", index, re.M) == ["Learn", "Do", "Look up", "Understand"]
    linked = [page for *_, pages in doors for page in re.findall(r"\]\(docs/(.+?)\)", pages)]
    assert len(linked) >= 4 and all(f"]({page})" in index for page in linked)


def test_every_page_is_listed():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    listed = {target.partition("#")[0] for target in re.findall(r"\]\(([^)]+)\)", index)}
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    pages |= {f"results/{path.name}" for path in (ROOT / "docs" / "results").glob("*.md")}
    assert pages <= listed
    assert [t for t in listed if not (ROOT / "docs" / t).exists()] == []


def test_no_page_presumes_an_index_that_has_dpcore():
    for path in [
        ROOT / "README.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "dpcore").rglob("*.py"),
    ]:
        found = re.findall(
            r"pip install (?:--?[\w-]+ )*[\"']?dpcore\b.*", path.read_text(encoding="utf-8")
        )
        assert not found, (path, found)


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
