"""The documents: their code is the code's, commands run, answers are what is printed."""

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from dpcore import errors
from dpcore.__main__ import _parser
from tests.ranks import python

ROOT = Path(__file__).resolve().parent.parent
DOCS = sorted((ROOT / "docs").rglob("*.md"))
LESSONS = sorted(
    (ROOT / "docs" / "learn").glob("*.md"), key=lambda path: int(path.name.partition("-")[0])
)


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def blocks(path):
    return re.findall(r"^```(bash|python)\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)


def run(command, timeout=180, **options):
    out = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, cwd=ROOT, **options
    )
    assert out.returncode == 0, out.stdout + out.stderr
    return out.stdout


def test_shown_code_is_the_code_that_runs():
    assert not run([sys.executable, "tools/snippets.py"])


@pytest.mark.parametrize("path", [p for p in DOCS if "<!-- code:" in p.read_text()], ids=name_of)
def test_a_change_of_shown_code_is_noticed(path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import snippets

    begin, name, what, _ = snippets.BLOCK.search(path.read_text()).groups()
    shown = snippets.rendered(path).split(begin)[1]
    assert shown.startswith("```")
    assert snippets.snippet(ROOT / name, what) in shown


def test_code_that_is_gone_stops_it(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import snippets

    with pytest.raises(SystemExit, match="has no 'NoSuchDDP'"):
        snippets.snippet(ROOT / "dpcore/reference/ladder.py", "NoSuchDDP")
    found = snippets.snippet(ROOT / "csrc/reducer/launch/launch_schedule.cpp", "class Oracle final")
    assert found.startswith("class Oracle final")
    assert found.rstrip().endswith("};")


@pytest.mark.timeout(1800)  # the first time it compiles csrc/comm
def test_the_files_that_a_call_enters_are_measured():
    run([sys.executable, "tools/entered_files.py"], timeout=1500)


def test_there_are_twenty_four_lessons_that_begin_with_a_number_to_predict():
    assert [int(path.name.partition("-")[0]) for path in LESSONS] == list(range(1, 25))
    for path in LESSONS:
        text = path.read_text()
        assert text.index("**Predict:**") < text.index("```") < text.index("<details>")
        assert f"](../images/learn/{path.stem}.svg)" in text
        assert "In torch's words: " in text


def test_each_lesson_leads_to_the_next():
    for path, following in itertools.pairwise(LESSONS):
        assert "[Next: " in path.read_text() and f"]({following.name})" in path.read_text()
        assert f"[Back]({path.name})" in following.read_text()


@pytest.mark.parametrize("tool", ["snippets", "pictures"])
def test_an_option_that_a_tool_does_not_have_is_refused(tool):
    command = [sys.executable, f"tools/{tool}.py", "--check"]
    out = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert out.returncode == 2 and "--check" in out.stderr


def test_the_pictures_of_the_lessons_are_drawn_from_what_they_show():
    assert not run([sys.executable, "tools/pictures.py"])


def test_every_error_has_its_usual_causes():
    text = (ROOT / "docs" / "failures.md").read_text()
    sections = dict(re.findall(r"^## `(\w+)`.*?\n(.*?)(?=^## )", text, re.MULTILINE | re.DOTALL))
    classes = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert set(sections) == classes
    for name, section in sections.items():
        rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
        assert len(rows) >= 4, name
        assert all(cell.strip() for row in rows for cell in row.strip("|").split("|")), name


def test_what_messages_are_said_to_say_is_in_the_code():
    """The words by which a lost rank's end is told, and every setting that is named."""
    code = "".join(path.read_text() for path in (ROOT / "csrc").rglob("*.cpp"))
    code += "".join(path.read_text() for path in (ROOT / "dpcore").rglob("*.py"))
    code += (ROOT / "setup.py").read_text()
    lost = (ROOT / "docs" / "failures.md").read_text().split("## `PeerLost`")[1].split("##")[0]
    words = re.findall(r"^\| `([^`]+)`", lost, re.MULTILINE)
    assert len(words) == 4
    assert all(word in code for word in words)
    for path in DOCS:
        for setting in re.findall(r"`(DPCORE_[A-Z_]+)", path.read_text()):
            assert setting in code, (path, setting)


def test_every_decision_is_in_the_list():
    folder = ROOT / "docs" / "decisions"
    titles = {path.name: path.read_text().splitlines()[0] for path in folder.glob("0*.md")}
    listed = re.findall(r"^\* (\d+): \[(.+)\]\((.+)\)$", (folder / "README.md").read_text(), re.M)
    assert {name: f"# {number}. {title}" for number, title, name in listed} == titles
    assert all(name.startswith(f"{int(number):04}-") for number, _, name in listed)


def test_every_folder_of_tests_says_what_it_is_for():
    folders = {
        path.parent for path in (ROOT / "tests").rglob("*") if path.suffix in (".py", ".cpp")
    }
    assert [folder for folder in folders if not (folder / "README.md").exists()] == []
    for folder in folders:
        text = (folder / "README.md").read_text()
        targets = re.findall(r"\]\(([^)#]+)\)", text)
        assert [target for target in targets if not (folder / target).exists()] == [], folder
        assert len(text.splitlines()) <= 15 or folder == ROOT / "tests"


def commands_of(path):
    lines = "".join(code for kind, code in blocks(path) if kind == "bash").splitlines()
    return [line.split("  #")[0].strip() for line in lines if line.strip()]


@pytest.mark.parametrize("path", DOCS, ids=name_of)
def test_commands_exist(path):
    for command in commands_of(path):
        words = shlex.split(command.replace("$(pgrep -f train.py)", "1"))
        words = words[: words.index(">")] if ">" in words else words  # of the shell
        if words[0] == "dpcore":
            _parser().parse_args(words[1:])
        elif words[0] == "make":
            run(["make", "-n", words[1]])
        elif words[:2] == ["python", "-m"]:
            module = ROOT / words[2].replace(".", "/")
            assert module.with_suffix(".py").exists() or (module / "__main__.py").exists()
        elif words[0] == "python":
            assert (ROOT / words[1]).exists()


# A lesson runs as the notebook made of it: each line that its answer names has to be printed.
ANSWERED = [path for path in LESSONS if "<!-- printed:" in path.read_text()]


def is_quick(command):
    """Not what trains or measures, unless all is to be tried."""
    return command.startswith("dpcore simulate ")


@pytest.mark.parametrize("path", ANSWERED, ids=name_of)
def test_the_answers_are_what_is_printed(path, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import notebooks

    program = tmp_path / "lesson.py"
    program.write_text(notebooks.script(notebooks.notebook(path, tmp_path), is_quick))
    out = python.run(program, capture_output=True, text=True, timeout=180, cwd=tmp_path)
    assert out.returncode == 0, out.stdout + out.stderr
    lines = out.stdout.splitlines()
    answers = re.findall(r"<!-- printed: (.+?) -->", path.read_text())
    assert answers
    for answer in answers:
        pattern = ".*".join(rf"(?<![\w.]){re.escape(word)}(?!\w)" for word in answer.split())
        assert any(re.search(pattern, line) for line in lines), (answer, lines)


@pytest.mark.skipif(os.environ.get("DPCORE_TEST_FULL") != "1", reason="make test-full")
@pytest.mark.parametrize("path", LESSONS, ids=name_of)
def test_a_lesson_runs_as_a_notebook(path, tmp_path, monkeypatch):
    """All of it, in a copy of what it needs: each command in two minutes on two cores."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import notebooks

    made = notebooks.notebook(path, tmp_path)
    for cell in made["cells"]:
        cell["source"] = [line.replace(" --open", "") for line in cell["source"]]
    for name in ("docs", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    program = tmp_path / "lesson.py"
    program.write_text(notebooks.script(made, lambda command: True))
    out = python.run(program, capture_output=True, text=True, timeout=400, cwd=tmp_path)
    assert out.returncode == 0, out.stdout + out.stderr


def test_notebooks_are_as_nbformat_wants_them(tmp_path):
    out = run([sys.executable, "tools/notebooks.py", str(tmp_path / "notebooks")])
    assert "24 notebooks, begin with" in out
    try:
        from nbformat import validate
    except ModuleNotFoundError:
        validate = None
    for path in LESSONS:
        made = json.loads((tmp_path / "notebooks" / f"{path.stem}.ipynb").read_text())
        if validate is not None:
            validate(made)
        kinds = [cell["cell_type"] for cell in made["cells"]]
        assert kinds[:2] == ["markdown", "code"] and kinds[-1] == "markdown"
        assert "**Predict:**" in "".join(made["cells"][0]["source"])
        for cell in made["cells"]:
            text = "".join(cell["source"])
            assert cell["cell_type"] == "code" or "<!--" not in text
            for target in re.findall(r"\]\(([^)\s#]+)", text):
                if cell["cell_type"] == "markdown" and "://" not in target:
                    assert (tmp_path / "notebooks" / target).resolve().exists(), target


def test_the_example_of_lesson_six_writes_two_traces(tmp_path):
    from dpcore.tools.show import figures_of, read_run

    command = ["examples/see_overlap.py", str(tmp_path)]
    out = python.run(*command, capture_output=True, text=True, timeout=180, cwd=ROOT)
    assert out.returncode == 0 and len(out.stdout.splitlines()) == 2, out.stderr
    bucketed, sequential = (
        figures_of(read_run(tmp_path / f"{name}.json")) for name in ("bucketed", "sequential")
    )
    assert sequential.overlap < 0.1
    assert bucketed.overlap > sequential.overlap
