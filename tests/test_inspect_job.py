"""Who holds up a job: what `dpcore inspect --job` concludes from black boxes, on made-up ones.

tests/faults/test_hangs_from_outside.py has real hangs.
"""

import json
import os
import subprocess
import sys
import time

import pytest

import dpcore as dp
from dpcore.__main__ import main
from dpcore.comm.launch.placement import place_of
from dpcore.tools.diagnose import black_box, long_wait
from dpcore.tools.diagnose.hang import judge
from dpcore.tools.diagnose.inspect import _calls_of, _job_lines
from dpcore.tools.diagnose.job import Family, Rank
from dpcore.tools.records import ROOT
from tests.ranks import python

REDUCE = {"collective": "all_reduce", "dtype": "float32", "count": 8, "bytes": 32, "op": "sum"}


def box(entered, *, waits=None, message=None, line="train.py:1 in step", alive=0.02, **more):
    """A rank that has entered so many operations; the last one is in flight if it ``waits``."""
    in_flight = [{"number": entered - 1, **REDUCE, "since_seconds": waits}] if waits else []
    where = {"line": line, "since_seconds": 5.0, "seen_seconds_ago": 0.5}
    return {
        "operations_entered": entered, "finalized": False, "in_flight": in_flight, "finished": [],
        "abort": None, "message": message, "where": where, "alive_seconds_ago": alive, **more,
    }  # fmt: skip


def family(*boxes, **more):
    """Ranks with one box each, or one per group; rank 0 is here, the others on another host."""
    ranks, members = {}, {}
    for number, of_rank in enumerate(boxes):
        groups = of_rank if 0 in of_rank else {0: of_rank}
        rank = Rank(number, groups)
        rank.process, rank.state = (4711, "S") if number == 0 else (None, "")
        rank.silent_seconds = None if number == 0 else groups[0]["alive_seconds_ago"]
        ranks[number] = rank
        for group in groups:
            members.setdefault(group, {})[len(members.get(group, {}))] = number
    return Family("job", len(boxes), ranks, members)


def test_the_rank_that_has_not_come():
    late = box(6, line="data.py:7 in load")
    verdict = judge(family(box(7, waits=4.0), late, box(7, waits=3.0)))
    assert (verdict.hangs, verdict.culprits) == (True, [1])
    assert verdict.operation == {"number": 6, **REDUCE, "since_seconds": 4.0}
    first, second = verdict.says
    assert first == (
        "Rank 1 (on another host) holds up the job: ranks 0 and 2 wait in operation 6 (all_reduce "
        "of 8 x float32, sum), for 4.0 s, and it has not called it."
    )
    assert second == "Rank 1 is at data.py:7 in load, for 5.0 s."


def test_the_cause_is_behind_the_one_that_is_late():
    """Rank 0 waits for rank 1, which waits in a group of its own for rank 2."""
    one = {0: box(3), 5: box(1, waits=6.0)}
    two = {0: box(3, line="slow.py:3 in compute"), 5: box(0)}
    verdict = judge(family(box(4, waits=5.0), one, two))
    assert verdict.culprits == [2]
    assert "of group 5 of ranks 1, 2" in verdict.says[0]
    assert "slow.py:3 in compute" in verdict.says[1]


def test_short_waits_are_no_hang():
    verdict = judge(family(box(7, waits=0.4), box(6)))
    assert (verdict.hangs, verdict.culprits) == (False, [])
    assert "this is not a hang" in verdict.says[0]
    assert "No rank waits" in judge(family(box(7), box(7))).says[0]


def test_an_error_comes_before_everything():
    abort = {"error": "PeerLost", "culprit": 1, "reason": "rank 1 died.", "seconds_ago": 3.0}
    verdict = judge(family(box(7, waits=9.0, abort=abort), box(6)))
    assert (verdict.hangs, verdict.culprits) == (False, [1])
    assert "gave up 3.0 s ago: PeerLost; rank 1 is to blame. rank 1 died." in verdict.says[0]


def test_all_have_come_and_one_is_silent():
    verdict = judge(family(box(7, waits=9.0), box(7, waits=9.0, alive=8.0)))
    assert (verdict.hangs, verdict.culprits) == (True, [1])
    assert "All ranks are in operation 6" in verdict.says[0]
    assert "Rank 1 has said nothing for 8.0 s" in verdict.says[1]


def test_messages_that_two_ranks_want_of_each_other():
    def recv(peer):
        return {
            "direction": "recv", "peer": peer, "tag": 0, "bytes": 4, "since_seconds": 7.0,
            "seen_seconds_ago": 0.02,
        }  # fmt: skip

    verdict = judge(family(box(1, message=recv(1)), box(1, message=recv(0))))
    assert verdict.culprits == [0, 1]
    assert "rank 0 waits for rank 1 in recv of 4 bytes from rank 1 (tag 0)" in verdict.says[1]
    done = recv(1) | {"seen_seconds_ago": 20.0}  # of a wait that is over
    assert not judge(family(box(1, message=done), box(1))).hangs


def test_a_long_wait_is_one_line_of_the_log():
    of_two = family(box(7, waits=12.0), box(6, line="eval.py:7 in score"))
    text = long_wait.text_of(of_two, judge(of_two), 1800)
    assert text == (
        "dpcore: Rank 1 (on another host) holds up the job: rank 0 waits in operation 6 "
        "(all_reduce of 8 x float32, sum), for 12.0 s, and it has not called it. Rank 1 is at "
        "eval.py:7 in score, for 5.0 s. The wait ends with a Timeout after 1800 s (timeout= of "
        "dpcore.init() or init_process_group())."
    )
    assert long_wait.text_of(of_two, judge(of_two), 1e12).endswith("The wait has no deadline.")
    of_two.world = 3  # nothing is known of the third
    text = long_wait.text_of(of_two, judge(of_two), 1800)
    assert "for 12.0 s. Not all ranks can be looked into from here." in text


def test_the_first_waiting_rank_of_a_host_speaks():
    both_wait = family(box(7, waits=4.0), box(7, waits=9.0), box(6))
    assert long_wait._speaker(both_wait, judge(both_wait)) == 4711
    other_host = family(box(6), box(7, waits=9.0))
    assert long_wait._speaker(other_host, judge(other_host)) is None


def test_it_stays_one_screen():
    of_many = family(box(7, waits=4.0), *[box(7, waits=4.0)] * 200, *[box(6)] * 50)
    lines = list(_job_lines(of_many, judge(of_many)))
    assert len(lines) < 30
    assert max(len(line) for line, _ in lines) < 400
    assert "and 46 more hold up the job" in lines[1][0]


def test_the_line_of_the_program():
    def outer():
        return json.dumps(None, default=None, cls=Encoder)

    class Encoder(json.JSONEncoder):
        def encode(self, o):
            return place_of(sys._getframe().f_back)

    here = outer()
    assert here.startswith("tests/test_inspect_job.py:")
    assert here.endswith(" in outer (within json.dumps)")
    assert place_of(None) == ""


def test_the_layout_is_that_of_the_sources(tmp_path):
    """A build has made it; this is a checkout whose build is of another day."""
    source, program = ROOT / "tools" / "control_layout.cpp", tmp_path / "layout"
    command = ["g++", "-std=c++20", "-I", ROOT / "csrc", source, "-o", program]
    subprocess.run(command, check=True)
    assert black_box.layout() == json.loads(subprocess.check_output([program]))


def test_without_a_layout_it_says_why(monkeypatch):
    monkeypatch.setattr(black_box, "__file__", "/nowhere/black_box.py")
    with pytest.raises(dp.Error, match=r"no C\+\+ compiler. Inspect the process with the dpcore"):
        black_box.layout.__wrapped__()


def test_the_command_loads_nothing_heavy():
    code = "import sys, dpcore.__main__ as m; m.main(sys.argv[1:]); print('torch' in sys.modules)"
    out = subprocess.run(
        [sys.executable, "-c", code, "inspect", "--job", "1"], capture_output=True, text=True
    )
    assert out.stdout == "False\n", out.stderr


def test_ranks_of_this_host(capsys):
    """Rank 1 never comes: its line is known, and both ranks are found without their numbers."""

    script = f"""
import sys, time, dpcore as dp
def sleep_for_ever():
    sys.stdin.readline()
comm = dp.init(init_method="of-this-host-{time.monotonic_ns()}")
comm.barrier()
if comm.rank == 1: sleep_for_ever()
comm.barrier(timeout=60)
"""
    variables = [{"RANK": str(rank), "WORLD_SIZE": "2"} for rank in range(2)]
    ranks = [
        python.start("-c", script, env=os.environ | each,
                     stdin=subprocess.PIPE, text=True)
        for each in variables
    ]  # fmt: skip
    try:
        pids = [str(rank.pid) for rank in ranks]
        deadline = time.monotonic() + 30
        said = {}
        # Rank 0 may wait in the second barrier before rank 1 has come out of the first one.
        while not (said.get("hangs") and "in sleep_for_ever" in str(said)):
            assert time.monotonic() < deadline, said
            time.sleep(0.3)
            if main(["inspect", "--job", "--json", pids[0]]) == 0:
                said = json.loads(capsys.readouterr().out.splitlines()[0])
        assert said["culprits"] == [1]
        assert "in sleep_for_ever" in said["ranks"][1]["where"]["line"]
        assert main(["inspect", "--job"]) == 0
        assert f"process {pids[1]}" in capsys.readouterr().out
    finally:
        ranks[1].communicate("go on\n", timeout=60)
        assert [rank.wait(timeout=60) for rank in ranks] == [0, 0]


def test_no_rank_anywhere(monkeypatch, capsys):
    monkeypatch.setattr("dpcore.tools.diagnose.inspect.ranks_of_this_host", list)
    assert main(["inspect", "--job"]) == 1
    assert "no process on this host that you may inspect" in capsys.readouterr().err


def test_a_process_whose_job_is_not_found_is_told(monkeypatch, capsys):
    monkeypatch.setattr(
        "dpcore.tools.diagnose.inspect.families", lambda pids: ([family(box(1))], {})
    )
    assert main(["inspect", "--job", "7"]) == 1
    assert "found no job that process 7 is in, only of process" in capsys.readouterr().err


@pytest.mark.parametrize(("user", "advice"), [(1000, "try sudo"), (0, "CAP_SYS_PTRACE")])
def test_a_process_that_may_not_be_inspected(monkeypatch, capsys, user, advice):
    def forbidden(path):
        raise PermissionError(path)

    monkeypatch.setattr(os, "listdir", forbidden)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert main(["inspect", "1"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("dpcore inspect: process 1 ") and advice in said


def test_the_dumps_of_a_job_for_torchs_analyser(tmp_path):
    ended = {"number": 4, **REDUCE, "took_ms": 2.0, "seconds_ago": 3.0}
    boxes = [box(6, waits=2.0, finished=[ended]), box(5, finished=[ended])]
    calls = _calls_of(family(*boxes))
    assert [(one.number, one.nbytes, one.dtype) for one in calls[0]] == [
        (4, 32, "float32"), (5, 32, "float32")
    ]  # fmt: skip
    assert [one.end_ns is None for one in calls[0]] == [False, True]
    assert calls[0][0].end_ns - calls[0][0].begin_ns == 2_000_000
    assert [one.number for one in calls[1]] == [4]
