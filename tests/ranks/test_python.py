"""Forked programs are as started ones: arguments, environment, folder, streams and ends."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.ranks import python

SAY = """
import json, os, sys
print(json.dumps({
    "arguments": sys.argv, "path": sys.path[0], "name": __name__, "folder": os.getcwd(),
    "mine": os.environ.get("MINE"), "home": os.environ.get("HOME"),
    "main": sys.modules["__main__"].__dict__ is globals(),
    "descriptors": sorted(map(int, os.listdir("/proc/self/fd")))[:-1],
}))
"""


def both(*words, **options):
    """What a forked Python did, and what a started one did."""
    options = {"capture_output": True, "text": True, "timeout": 60, **options}
    return python.run(*words, **options), subprocess.run([sys.executable, *words], **options)


@pytest.mark.parametrize("kind", ["code", "script", "module"])
def test_a_program_finds_what_it_would_find(tmp_path, kind):
    (tmp_path / "said.py").write_text(SAY)
    program = {"code": ["-c", SAY], "script": ["said.py"], "module": ["-m", "said"]}[kind]
    environment = {**os.environ, "MINE": "yes"}
    del environment["HOME"]
    forked, started = both(*program, "a", "-b", cwd=tmp_path, env=environment)
    assert json.loads(forked.stdout) == json.loads(started.stdout), (forked, started)


@pytest.mark.parametrize(
    "code",
    [
        "pass",
        "import sys; sys.exit(3)",
        "import sys; sys.exit('that is all')",
        "import os; os._exit(4)",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "import os; os.kill(os.getpid(), 9)",
        "import atexit; atexit.register(print, 'at the end'); kept = print",
        "import sys; print(sys.stdin.read(), file=sys.stderr)",
    ],
)
def test_a_program_ends_as_it_would_end(code):
    forked, started = both("-c", code, input="a line\n")
    ends = [(end.returncode, end.stdout, end.stderr) for end in (forked, started)]
    assert ends[0] == ends[1]


def test_an_exception_is_printed_and_the_status_is_1():
    out = python.run("-c", "raise KeyError('not there')", capture_output=True, text=True)
    assert out.returncode == 1
    assert out.stderr.rstrip().endswith("KeyError: 'not there'")


def test_torch_is_there_and_nothing_is_left_of_other_programs():
    code = (
        "import sys; assert 'torch' in sys.modules; assert not hasattr(sys, 'mark'); sys.mark = 1"
    )
    code += "; import os; assert 'MARK' not in os.environ; os.environ['MARK'] = '1'"
    code += "; assert len(os.listdir('/proc/self/task')) == 1"
    assert [python.run("-c", code).returncode for _ in range(2)] == [0, 0]


def test_it_is_talked_to_and_killed():
    code = "import sys, time; print(sys.stdin.readline(), end='', flush=True); time.sleep(60)"
    with python.start("-c", code, stdin=-1, stdout=-1, text=True, start_new_session=True) as asked:
        assert asked.poll() is None
        assert os.getsid(asked.pid) == asked.pid
        asked.stdin.write("a line\n")
        asked.stdin.flush()
        assert asked.stdout.readline() == "a line\n"
        asked.kill()
        assert asked.wait(timeout=20) == -signal.SIGKILL
        assert asked.poll() == -signal.SIGKILL


def test_whoever_takes_too_long_is_killed():
    began = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        python.run("-c", "import time; time.sleep(60)", timeout=0.2)
    assert time.monotonic() - began < 30
