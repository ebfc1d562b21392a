"""tools/gpu_tests.py: what hangs, crashes or fails is named and keeps nothing else from running."""

import _thread
import os
import sys
import threading
import time

import pytest

from tests.cuda.report import lines_of
from tools.gpu_machine import is_there
from tools.gpu_tests import File, run_side_by_side, run_until

TESTS = """
import os, time
import pytest

def test_right(record_property):
    record_property("library", "mapped")
def test_crashes(): os._exit(3)
def test_wrong(): assert 1 == 2
@pytest.mark.skip(reason="no GPU")
def test_left_out(): pass
@pytest.mark.timeout(6)
def test_hangs():
    print("for whom it waits", flush=True)
    time.sleep(600)
def test_behind(): pass
"""
# As in pyproject.toml: without pytest-timeout this is a marker and an option that nobody knows.
SETTINGS = "[pytest]\naddopts = --strict-markers\ntimeout = 600\n"


def names(found):
    return sorted(name.split("::")[-1] for name in found)


def ran(tmp_path, text, **options):
    (tmp_path / "test_it.py").write_text(text)
    file = File(str(tmp_path / "test_it.py"), tmp_path, time.monotonic() + 300, **options)
    run_side_by_side([file])
    return file.summary()


@pytest.mark.parametrize("plugin", [True, False])
def test_a_file_goes_on_behind_what_does_not_come_back(tmp_path, plugin):
    if plugin and not is_there("pytest_timeout"):
        pytest.skip("needs pytest-timeout")
    (tmp_path / "pytest.ini").write_text(SETTINGS)
    found = ran(tmp_path, TESTS, limit=6, plugin=plugin)
    assert found["passed"] == 2 and not found["cut_off"]
    assert names(found["seconds"]) == ["test_behind", "test_right"]
    assert names(found["failed"]) == ["test_wrong"]
    assert "assert 1 == 2" in next(iter(found["failed"].values()))
    assert names(found["hung_or_crashed"]) == ["test_crashes", "test_hangs"]
    (printed,) = [of for name, of in found["hung_or_crashed"].items() if name.endswith("hangs")]
    assert "in test_hangs" in printed, "where it hung"
    assert found["skipped"] == {"no GPU": 1}
    assert list(found["facts"].values()) == [{"library": "mapped"}]


def test_a_file_whose_time_is_over_says_what_was_seen(tmp_path):
    (tmp_path / "test_it.py").write_text("import time\ndef test_long(): time.sleep(600)\n")
    file = File(str(tmp_path / "test_it.py"), tmp_path, time.monotonic() + 300)
    while not lines_of(file.report):
        time.sleep(0.05)
    file.ends_at = time.monotonic()
    run_side_by_side([file])
    found = file.summary()
    assert found["cut_off"] and names(found["hung_or_crashed"]) == ["test_long"]


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    found = ran(tmp_path, "import nothing_of_that_name\n")
    (why,) = found["failed"].values()
    assert "nothing_of_that_name" in why


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("import atexit, os\natexit.register(os.abort)\ndef test_right(): pass\n", "Aborted"),
        (
            "import os, pytest\n@pytest.fixture(scope='module')\n"
            "def it():\n    yield\n    os._exit(3)\n"
            "def test_right(it): pass\n",
            "",
        ),
    ],
)
def test_what_crashes_behind_its_last_test_is_named(tmp_path, text, printed):
    found = ran(tmp_path, text)
    assert found["passed"] == 1
    ((name, said),) = found["hung_or_crashed"].items()
    assert name == str(tmp_path / "test_it.py") and printed in said


def test_options_that_pytest_does_not_take_are_seen(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    found = ran(tmp_path, "def test_right(): pass\n")
    ((name, said),) = found["hung_or_crashed"].items()
    assert name == str(tmp_path / "test_it.py") and "--no-such-option" in said


def test_ctrl_c_ends_what_was_started(tmp_path):
    """They run in sessions of their own, which a terminal tells nothing."""
    (tmp_path / "test_it.py").write_text("import time\ndef test_long(): time.sleep(600)\n")
    file = File(str(tmp_path / "test_it.py"), tmp_path, time.monotonic() + 300)
    threading.Timer(0.5, _thread.interrupt_main).start()
    with pytest.raises(KeyboardInterrupt):
        run_side_by_side([file])
    assert file.process.returncode is not None

    told = tmp_path / "pid"
    program = f"import os, time; open({str(told)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    threading.Timer(1.0, _thread.interrupt_main).start()
    with pytest.raises(KeyboardInterrupt):
        run_until([sys.executable, "-c", program], os.environ, time.monotonic() + 300)
    with pytest.raises(ProcessLookupError):
        os.kill(int(told.read_text()), 0)
