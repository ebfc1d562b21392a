"""A second run for what failed: tools/test_again.py."""

import importlib.util
import json
import pathlib

import pytest

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
    monkeypatch.setattr(tool, "FAILED", tmp_path / "lastfailed")
    return tool


@pytest.mark.parametrize(
    ("failed", "status", "said"),
    [
        ((), 1, "ended in another way"),
        (("lucky",), 0, "FLAKY, passed in its second run: test_it.py::test_lucky"),
        (("lucky", "wrong"), 1, "failed twice: test_it.py::test_wrong"),
        (("a", "b", "c", "d"), 1, "4 tests failed, more than 3"),
    ],
    ids=["crash", "flaky", "wrong", "many"],
)
def test_what_failed_runs_again(again, capsys, failed, status, said):
    again.FAILED.write_text(json.dumps({f"test_it.py::test_{name}": True for name in failed}))
    (again.ROOT / "luck").touch()
    assert again.main() == status
    assert said in capsys.readouterr().out
