"""A second run for what failed: tools/test_again.py."""

import importlib.util
import json
import pathlib

import pytest

from tests.ranks import python

ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture
def again(tmp_path, monkeypatch):
    """The tool, in a tree of its own with three tests; the third needs the file `luck`."""
    spec = importlib.util.spec_from_file_location("test_again", ROOT / "tools" / "test_again.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    (tmp_path / "test_it.py").write_text(
        "import pathlib\n"
        "def test_right(): pass\n"
        "def test_wrong(): assert False\n"
        "def test_lucky(): assert pathlib.Path(__file__).with_name('luck').exists()\n"
    )
    monkeypatch.setattr(tool, "ROOT", tmp_path)
    monkeypatch.setattr(tool, "CACHE", tmp_path / "kept")
    (tool.CACHE / "cache").mkdir(parents=True)
    (tool.CACHE / "dpcore").mkdir()
    return tool


@pytest.mark.parametrize(
    ("failed", "ended", "status", "said"),
    [
        ((), 2, 1, "nothing to run again"),
        (("lucky",), 2, 1, "nothing to run again"),
        (("lucky",), None, 1, "nothing to run again"),
        (("lucky",), 1, 0, "FLAKY, passed in its second run: test_it.py::test_lucky"),
        (("lucky", "wrong"), 1, 1, "failed twice: test_it.py::test_wrong"),
        (("a", "b", "c", "d"), 1, 1, "4 tests failed, more than 3"),
    ],
    ids=["interrupted", "cut short", "crash", "flaky", "wrong", "many"],
)
def test_what_failed_runs_again(again, capsys, failed, ended, status, said):
    names = {f"test_it.py::test_{name}": True for name in failed}
    (again.CACHE / "cache" / "lastfailed").write_text(json.dumps(names))
    (again.CACHE / "dpcore" / "exitstatus").write_text(json.dumps(ended))
    (again.ROOT / "luck").touch()
    assert again.main() == status
    assert said in capsys.readouterr().out


def test_a_run_leaves_how_it_ended(tmp_path):
    """What the tool reads is written by tests/conftest.py, also when pytest is stopped."""
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / "tests").mkdir()  # with a machine of its own: this test has a share of the other
    (tmp_path / "tests" / "sharing.py").write_text((ROOT / "tests" / "sharing.py").read_text())
    kept = tmp_path / ".pytest_cache" / "v" / "dpcore" / "exitstatus"
    for body, status in (
        ("def test_it(): pass", 0),
        ("def test_it(): assert False", 1),
        ("import pytest\ndef test_it(): pytest.exit('enough')", 2),
        ("import os\ndef test_it(): os._exit(5)", None),
    ):
        (tmp_path / "test_it.py").write_text(body)
        options = ["-q", "--rootdir", str(tmp_path), str(tmp_path)]
        python.run("-m", "pytest", *options, cwd=tmp_path, capture_output=True, timeout=60)
        assert json.loads(kept.read_text()) == status
