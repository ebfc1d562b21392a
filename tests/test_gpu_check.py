"""tools/gpu_check.py: what hangs, crashes or fails is named and keeps nothing else from running."""

import sys
import time

from tests.cuda.report import lines_of
from tools import gpu_check

TESTS = """
import os, time
import pytest

def test_right(record_property):
    record_property("library", "mapped")
def test_crashes(): os._exit(3)
def test_wrong(): assert 1 == 2
@pytest.mark.skip(reason="no GPU")
def test_left_out(): pass
def test_hangs():
    print("for whom it waits", flush=True)
    time.sleep(600)
def test_behind(): pass
"""


def names(found):
    return sorted(name.split("::")[-1] for name in found)


def test_a_file_goes_on_behind_what_does_not_come_back(tmp_path):
    (tmp_path / "test_it.py").write_text(TESTS)
    file = gpu_check.File(str(tmp_path / "test_it.py"), tmp_path, time.monotonic() + 300, limit=5)
    gpu_check.run_side_by_side([file])
    found = file.summary()
    assert found["passed"] == 2 and not found["cut_off"]
    assert names(found["seconds"]) == ["test_behind", "test_right"]
    assert names(found["failed"]) == ["test_wrong"]
    assert "assert 1 == 2" in next(iter(found["failed"].values()))
    assert names(found["hung_or_crashed"]) == ["test_crashes", "test_hangs"]
    (printed,) = [of for name, of in found["hung_or_crashed"].items() if name.endswith("hangs")]
    assert "for whom it waits" in printed or "time.sleep(600)" in printed
    assert found["skipped"] == {"no GPU": 1}
    assert list(found["facts"].values()) == [{"library": "mapped"}]


def test_a_file_whose_time_is_over_says_what_was_seen(tmp_path):
    (tmp_path / "test_it.py").write_text("import time\ndef test_long(): time.sleep(600)\n")
    file = gpu_check.File(str(tmp_path / "test_it.py"), tmp_path, time.monotonic() + 300)
    while not lines_of(file.report):
        time.sleep(0.05)
    file.ends_at = time.monotonic()
    gpu_check.run_side_by_side([file])
    found = file.summary()
    assert found["cut_off"] and names(found["hung_or_crashed"]) == ["test_long"]


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "test_it.py").write_text("import nothing_of_that_name\n")
    file = gpu_check.File(str(tmp_path / "test_it.py"), tmp_path, time.monotonic() + 300)
    gpu_check.run_side_by_side([file])
    (why,) = file.summary()["failed"].values()
    assert "nothing_of_that_name" in why


def test_the_parts_are_put_together(tmp_path, monkeypatch):
    (tmp_path / "test_it.py").write_text("def test_right(): pass\n")
    out = tmp_path / "gpu.json"
    command = ["gpu_check", "--out", str(out), "--folder", str(tmp_path / "logs")]
    command += ["--files", str(tmp_path / "test_it.py")]
    monkeypatch.setattr(sys, "argv", command)
    assert gpu_check.main() == 0
    assert '"passed": 1' in out.read_text()
