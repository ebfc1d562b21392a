"""Long before the deadline, a rank that waits logs which one is late, and what that one does."""

import gc
import os
import re
import signal
import subprocess
import threading
import time

import pytest

from dpcore.base.processes import look_at
from dpcore.comm.launch import placement
from tests.ranks import python

SCRIPT = """
import os, signal, sys, torch, torch.distributed as dist, dpcore
from dpcore.comm.launch import placement

how, late, folder, rank = *sys.argv[1:4], int(sys.argv[4])
placement._watch._explains_after = 1.0

def evaluate():
    sys.stdin.readline()

if how == "init":
    dpcore.init(rank=rank, world_size=2, init_method=f"file://{folder}/meet")
elif how == "long":
    dpcore.init(rank=rank, world_size=2, init_method=f"file://{folder}/meet", timeout=1200)
else:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
model = dpcore.DataParallel(torch.nn.Linear(2, 1))
model(torch.ones(1, 2)).sum().backward()
if rank == 1 and late == "stopped":
    os.kill(os.getpid(), signal.SIGSTOP)
elif rank == 1:
    evaluate()
else:
    sys.stdin.readline()
model(torch.ones(1, 2)).sum().backward()
"""


@pytest.mark.patient
@pytest.mark.parametrize("late", ["stopped", "evaluates"])
@pytest.mark.parametrize(("how", "seconds"), [("init", 30), ("long", 1200), ("gloo", 1800)])
def test_a_rank_that_is_late_is_named_long_before_the_deadline(how, seconds, late, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    waits, is_late = (
        python.start(
            str(tmp_path / "script.py"), how, late, str(tmp_path), str(rank),
            stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    )  # fmt: skip
    pid = is_late.pid
    deadline = time.monotonic() + 60
    while late == "stopped" and look_at(pid).state != "T":
        assert time.monotonic() < deadline and is_late.poll() is None
        time.sleep(0.02)
    waits.stdin.write("go on\n")
    waits.stdin.flush()
    does = {
        "stopped": f"Rank 1 is stopped, by SIGSTOP, .*`kill -CONT {pid}` lets it go on",
        "evaluates": r"Rank 1 is at .*/script.py:\d+ in evaluate",
    }[late]
    said = ""
    while not re.search(does, said):
        said = waits.stderr.readline()
        assert said, "it ended without a word"
    assert f"Rank 1 (process {pid} on this host) holds up the job: rank 0 waits in" in said
    assert f"ends with a Timeout after {seconds} s (timeout= of dpcore.init() or " in said
    if late == "stopped":
        os.kill(pid, signal.SIGCONT)
    is_late.communicate("go on\n", timeout=60)
    waits.communicate(timeout=60)
    assert (waits.returncode, is_late.returncode) == (0, 0)


def test_nothing_is_collected_while_another_threads_frames_are_walked(monkeypatch):
    """Ranks of Python 3.11 crashed: frames of a running thread were freed meanwhile."""
    collected = []
    monkeypatch.setattr(placement, "place_of", lambda _: collected.append(gc.isenabled()) or "here")
    assert placement._place_of_thread(threading.get_ident()) == "here"
    assert collected == [False] and gc.isenabled()
