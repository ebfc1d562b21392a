"""dpcore exercise as a student calls it: list, start, hint, check, with mistakes, and by pytest."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import dpcore
from dpcore.base.processes import is_running
from dpcore.school.exercise import catalogue, judging, report
from tests.ranks import python

KNOWN = catalogue.exercises()


def exercise(*arguments, at, timeout=180):
    command = ["-m", "dpcore", "exercise", *map(str, arguments)]
    return python.run(*command, capture_output=True, text=True, timeout=timeout, cwd=at)


def test_there_are_nineteen_in_order():
    assert [one.number for one in KNOWN] == list(range(1, 20))


def test_list(tmp_path):
    out = exercise(at=tmp_path)
    assert out.returncode == 0, out.stderr
    lines = out.stdout.splitlines()
    assert len(lines) == len(KNOWN) + 2
    assert "Begin with `dpcore exercise start 1`." in out.stdout
    assert exercise("start", "ring", at=tmp_path).returncode == 0
    out = exercise("list", "--json", at=tmp_path)
    found = json.loads(out.stdout)
    assert [entry["name"] for entry in found if entry["begun"]] == ["ring"]
    assert found[1]["file"] == "my_exercises/02_ring/ring.py"
    assert "my_exercises/02_ring/ring.py" in exercise("list", at=tmp_path).stdout


def test_start_writes_the_task_and_never_over_your_work(tmp_path):
    out = exercise("start", "7", at=tmp_path)
    assert out.returncode == 0, out.stderr
    file = tmp_path / "my_exercises" / "07_buckets" / "buckets.py"
    assert "dpcore exercise check 7" in out.stdout
    assert "NotImplementedError" in file.read_text()
    file.write_text("mine\n")
    out = exercise("start", "7", at=tmp_path)
    assert (out.returncode, out.stdout) == (2, "")
    assert "is there already" in out.stderr
    assert file.read_text() == "mine\n"
    assert exercise("start", "7", "--again", at=tmp_path).returncode == 0
    assert "NotImplementedError" in file.read_text()
    place = tmp_path / "clone" / "07_buckets"  # as a clone has it
    place.mkdir(parents=True)
    (place / "source.py").write_text("")
    out = exercise("start", "7", "--folder", "clone", at=tmp_path)
    assert (out.returncode, out.stdout) == (2, "")
    assert "clone/07_buckets has the solution, in source.py: --folder names another" in out.stderr
    assert [path.name for path in place.iterdir()] == ["source.py"]
    out = exercise("start", "7", "--folder", "my work", at=tmp_path)
    assert "dpcore exercise check 7 --folder 'my work'" in out.stdout
    assert (tmp_path / "my work" / "07_buckets" / "buckets.py").is_file()


def test_hints_come_one_by_one(tmp_path):
    first = exercise("hint", "ring", at=tmp_path).stdout
    assert "2 more: dpcore exercise hint 2 2" in first
    last = exercise("hint", "ring", "3", at=tmp_path).stdout
    assert "more:" not in last and last not in first
    for number in ("4", "0", "x"):
        out = exercise("hint", "ring", number, at=tmp_path)
        assert (out.returncode, out.stdout) == (2, "")
        assert "numbered 1 to 3" in out.stderr


def test_the_solution_passes_and_so_says_the_json(tmp_path):
    file = tmp_path / "buckets.py"
    file.write_text(exercise("solution", "buckets", at=tmp_path).stdout)
    assert file.read_text() == catalogue.find("buckets").parts.solution
    out = exercise("check", "buckets", at=tmp_path)  # of this name, right here
    assert out.returncode == 0, out.stdout + out.stderr
    assert re.search(r"6 of 6 hold \([\d.]+ s\)", out.stdout)
    assert "Next, Bucketed DDP: dpcore exercise start 8" in out.stdout
    file.write_text(file.read_text() + 'print("beside", flush=True)\n')
    out = exercise("check", "buckets", "buckets.py", "--json", at=tmp_path)
    assert out.returncode == 0, out.stderr
    found = json.loads(out.stdout)
    assert (found["score"], found["max_score"]) == (6, 6)
    assert [test["status"] for test in found["tests"]] == ["passed"] * 6
    assert [test["number"] for test in found["tests"]] == [f"7.{n}" for n in range(1, 7)]
    assert "rank 0 printed:\n  beside" in found["output"]
    (one,) = found["extra_data"]["exercises"]
    assert one["passed"] and re.fullmatch(r"[0-9a-f]{64}", one["sha256"])


def test_what_is_not_written_fails_with_its_line(tmp_path):
    assert exercise("start", "flat_ddp", at=tmp_path).returncode == 0
    out = exercise("check", "5", at=tmp_path)
    assert out.returncode == 1
    line = next(
        number
        for number, text in enumerate(catalogue.find("5").parts.task.splitlines(), 1)
        if "NotImplementedError" in text
    )
    assert f"(flat_ddp.py, line {line}, in finish)" in " ".join(out.stdout.split())
    assert "0 of 7 hold" in out.stdout
    assert "Stuck? dpcore exercise hint 5" in out.stdout
    out = exercise("check", "--json", at=tmp_path)  # all that is begun
    found = json.loads(out.stdout)
    assert (out.returncode, found["score"], found["extra_data"]["passed"]) == (1, 0, False)
    assert [test["extra_data"]["judged"] for test in found["tests"]][:2] == [True, False]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def plan_buckets(:\n", "is not valid Python: invalid syntax"),
        ("", "there is no plan_buckets in buckets.py, which the task has"),
        ("import no_such_module\n", "raised ModuleNotFoundError (buckets.py, line 1"),
        ("def plan_buckets(*a):\n    return 7\n", "which is not a list of lists"),
        ("class Mine(Exception): pass\nraise Mine('so')\n", "raised Mine (your own)"),
        ("import sys\nsys.exit(3)\n", "raised SystemExit"),
        ("import os\nos.kill(os.getpid(), 11)\n", "ended by SIGSEGV"),
    ],
)
def test_a_file_that_is_no_solution_is_refused_in_words(text, says, tmp_path):
    file = tmp_path / "buckets.py"
    file.write_text(text)
    said = report.words(judging.judge(catalogue.find("buckets"), file, {"each_once"}))
    assert says in " ".join(said.split())
    assert "0 of 1 hold" in said and "Traceback" not in said


def test_what_a_submission_has_started_is_ended(tmp_path):
    file, note = tmp_path / "buckets.py", tmp_path / "child"
    file.write_text(
        "import os, time\nif not (child := os.fork()):\n    time.sleep(60)\n    os._exit(0)\n"
        f"open({str(note)!r}, 'w').write(str(child))\n" + catalogue.find("buckets").parts.solution
    )
    verdict = judging.judge(catalogue.find("buckets"), file, {"order"})
    assert verdict.passed, report.words(verdict)
    until = time.monotonic() + 10
    while is_running(int(note.read_text())):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_reader_that_goes_is_no_error(tmp_path):
    command = [sys.executable, "-m", "dpcore", "exercise", "solution", "8"]
    out = subprocess.run(
        f"{shlex.join(command)} | true", shell=True, capture_output=True, text=True, cwd=tmp_path
    )
    assert out.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["check", "1"], "there is no my_exercises/01_all_reduce/all_reduce.py: dpcore exercise"),
        (["check"], "nothing was started in my_exercises: dpcore exercise start 1"),
        (["start"], "start: which one?"),
        (["start", "rang"], "there is no exercise 'rang'; is it ring?"),
        (["start", "99"], "they are numbered 1 to 19"),
        (["start", "1", "mine"], "start 1 takes no mine: --folder says where your files are"),
        (["check", "1", "nowhere.py"], "there is no nowhere.py"),
        (["hint", "1", "--json"], "--json goes with list and check"),
    ],
)  # fmt: skip
def test_a_wrong_call_says_what_would_be_right(arguments, says, tmp_path):
    out = exercise(*arguments, at=tmp_path)
    assert out.returncode in (1, 2)
    assert says in out.stderr and not out.stdout
    assert not list(tmp_path.iterdir())


def test_a_clone_without_a_core_does_not_hide_the_one_that_is_installed(tmp_path):
    """docs/teach.md: a wheel is installed, and commands are typed in the folder of a clone."""
    package = Path(dpcore.__file__).parent
    clone, program = tmp_path / "clone", tmp_path / "bin" / "dpcore"
    skipped = shutil.ignore_patterns("_cores", "__pycache__")
    shutil.copytree(package, clone / "dpcore", ignore=skipped)
    shutil.copytree(package.parent / "exercises", clone / "exercises", ignore=skipped)
    program.parent.mkdir()
    program.write_text("import sys\nfrom dpcore.__main__ import main\nsys.exit(main())\n")

    def typed(*command):
        where = os.environ | {"PYTHONPATH": str(package.parent)}
        options = {"capture_output": True, "text": True, "timeout": 180, "cwd": clone}
        return subprocess.run([sys.executable, *map(str, command)], env=where, **options)

    assert typed(program, "exercise", "start", "7").returncode == 0
    file = clone / "my_exercises" / "07_buckets" / "buckets.py"
    assert not (clone / "exercises" / "07_buckets" / "buckets.py").exists()
    file.write_text(catalogue.find("7").parts.solution)
    out = typed(program, "exercise", "check", "7")
    assert out.returncode == 0, out.stdout + out.stderr
    out = typed("-m", "dpcore", "exercise", "check", "7")
    assert (out.returncode, out.stdout) == (1, "")
    assert out.stderr == (
        f"dpcore exercise: {clone}/dpcore was imported, which has no compiled core, and hides "
        f"{package}, which has one: type `dpcore` instead of `python -m dpcore` (and `pytest` "
        "instead of `python -m pytest`), or do it in another folder\n"
    )


def test_pytest_does_the_same(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)  # of whoever runs this test
    assert exercise("start", "7", at=tmp_path).returncode == 0
    place = tmp_path / "my_exercises" / "07_buckets"
    text = (place / "buckets.py").read_text().replace(
        'raise NotImplementedError("which parameters travel together?")',
        "return [[number] for number in reversed(range(len(sizes)))]",
    )  # fmt: skip
    (place / "buckets.py").write_text(text)

    def tests():
        command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "my_exercises/07_buckets"]
        return python.run(*command, capture_output=True, text=True, timeout=180, cwd=tmp_path)

    out = tests()
    assert out.returncode == 1
    assert "test[each_once]" not in out.stdout  # it holds
    assert "FAILED my_exercises/07_buckets/test_07_buckets.py::test[cap] - " in out.stdout
    assert "below its cap" in out.stdout
    (place / "buckets.py").write_text(catalogue.find("7").parts.solution)
    out = tests()
    assert (out.returncode, "6 passed" in out.stdout) == (0, True), out.stdout
    (place / "buckets.py").unlink()
    assert "dpcore exercise start 7 writes it" in tests().stdout
