"""Forked programs are as started ones: arguments, environment, folder, streams and ends; whether a
test asks for them or a launcher, which runs `python.executable()`."""

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


def all_ways(*words, **options):
    """What a forked Python did, what one did that a launcher has forked, and a started one."""
    options = {"capture_output": True, "text": True, "timeout": 60, **options}
    launched = [[program, *words] for program in (python.executable(), sys.executable)]
    return [python.run(*words, **options), *(subprocess.run(o, **options) for o in launched)]


@pytest.mark.parametrize("kind", ["code", "script", "module"])
def test_a_program_finds_what_it_would_find(tmp_path, kind):
    (tmp_path / "said.py").write_text(SAY)
    program = {"code": ["-c", SAY], "script": ["said.py"], "module": ["-m", "said"]}[kind]
    environment = {**os.environ, "MINE": "yes"}
    del environment["HOME"]
    *forked, started = all_ways(*program, "a", "-b", cwd=tmp_path, env=environment)
    for one in forked:
        assert json.loads(one.stdout) == json.loads(started.stdout), (one, started)


@pytest.mark.parametrize(
    "code",
    [
        "pass",
        "import sys; sys.exit(3)",
        "import sys; sys.exit(300)",
        "import sys; sys.exit('that is all')",
        "import os; os._exit(4)",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "import os; os.kill(os.getpid(), 9)",
        "import atexit; atexit.register(print, 'at the end'); kept = print",
        "import ctypes; ctypes.CDLL(None).printf(b'in a buffer of C until the end')",
        "kept = type('Kept', (), {'__del__': lambda self: print('gone')})()",
        "import threading; threading.Timer(0.1, print, ['behind the last line']).start()",
        "import sys; sys.stdout.close()",
        "import sys; print(sys.stdin.read(), file=sys.stderr)",
    ],
)
def test_a_program_ends_as_it_would_end(code):
    found = all_ways("-c", code, input="a line\n")
    *forked, started = ((end.returncode, end.stdout, end.stderr) for end in found)
    for way, end in zip(("forked", "forked for a launcher"), forked, strict=True):
        assert end == started, f"{way}: {end}, and a started Python: {started}"


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


# ---- in the place of Python ----------------------------------------------------------------------


def test_its_pythons_are_forked_in_their_turn(tmp_path):
    """Also the fork server of `dpcore.spawn`, and what a console script of this one runs."""
    has_torch = "import sys; print('torch' in sys.modules)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-u', '-c', {has_torch!r}])"
    code += "; import dpcore; print(dpcore.spawn(lambda comm: comm.rank, 2))"
    out = subprocess.run([python.executable(), "-c", code], capture_output=True, text=True)
    assert out.stdout == "True\n[0, 1]\n", out.stderr
    script = tmp_path / "ranks.py"
    # one write: a print is two, between which the other rank may come
    line = "import os, sys; os.write(1, f\"{'torch' in sys.modules}\\n\".encode())"
    script.write_text(f"{line}\nassert os.environ['RANK'] in '01'")
    command = [python.folder() / "torchrun", "--standalone", "--nproc-per-node", "2", script]
    out = subprocess.run(command, capture_output=True, text=True)
    assert out.stdout == "True\n" * 2, out.stderr


def test_a_line_to_the_launcher_is_passed_on():
    ours, theirs = os.pipe()
    code = f"import os; os.write({theirs}, b'here'); os.fstat(0)"
    out = subprocess.run([python.executable(), "-c", code], pass_fds=[theirs])
    os.close(theirs)
    with open(ours) as line:
        assert line.read() == "here"  # and nobody else holds the other end
    assert out.returncode == 0


WAITS = """
import os, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(7))
print(os.getpid(), flush=True)
for _ in range(600):  # one sleep would hold up the handler of a signal that comes just before
    time.sleep(0.1)
"""


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGUSR1, 7), (signal.SIGTERM, -15), (signal.SIGKILL, -9)]
)
def test_signals_reach_it_and_its_end_is_told(number, status):
    words = [python.executable(), "-c", WAITS]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as launched:
        process = int(launched.stdout.readline())
        assert process != launched.pid
        launched.send_signal(number)
        assert launched.wait(timeout=20) == status
    deadline = time.monotonic() + 20
    while os.path.exists(f"/proc/{process}") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not os.path.exists(f"/proc/{process}")


def test_what_is_no_program_is_left_to_python():
    out = subprocess.run(
        [python.executable(), "-S", "-c", "import sys; print('torch' in sys.modules)"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert out.stdout == "False\n", out.stderr


def test_code_that_runs_first(monkeypatch):
    python.run_first(monkeypatch, "import json; json.mark = 5")
    out = python.run("-c", "import json; print(json.mark)", capture_output=True, text=True)
    assert out.stdout == "5\n"
