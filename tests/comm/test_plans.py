"""Plans of MSCCLang and mscclpp: read, proved, turned into moves, run; refused with the place."""

import json
import re

import numpy as np
import pytest

import dpcore
from dpcore import reference
from dpcore.__main__ import main
from dpcore.base.own_algorithm import schedule_of
from dpcore.reference import plans
from tests.comm import plan_files
from tests.comm.plan_files import PLANS, step, xml


@pytest.fixture
def file(tmp_path):
    def written(text, name="plan.xml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return written


def refused(path):
    with pytest.raises(plans.PlanError) as problem:
        plans.schedule_of_file(path)
    said = str(problem.value)
    assert said.startswith(f"{path}, ") and "\n" not in said
    return said.removeprefix(f"{path}, ")


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_is_proved_and_has_moves_that_are_right(file, name):
    made = plans.schedule_of_file(file(PLANS[name], name))
    inputs = [np.arange(12) * (rank + 1) for rank in range(made.world)]
    expected = sum(inputs) if made.collective == "all_reduce" else np.concatenate(inputs)
    for got in reference.run(made, inputs):
        np.testing.assert_array_equal(got, expected)


def test_the_moves_are_those_of_the_same_algorithm_of_dpcore(file):
    def sent(schedule):  # whichever chunk begins where
        return sorted((m.step, m.src, m.dst, m.reduce) for m in schedule.moves)

    ring = plans.schedule_of_file(file(PLANS["ring.xml"]))
    assert sent(ring) == sent(reference.make_schedule("ring", "all_reduce", 4))
    for name in ("in_scratch.xml", "by_reading.json", "by_packets.json"):
        made = plans.schedule_of_file(file(PLANS[name], name))
        assert made.moves == reference.make_schedule("two_shot", "all_reduce", 2).moves
        assert made.ordered


def test_chunks_that_make_the_same_moves_are_one(file):
    assert plans.schedule_of_file(file(plan_files.gather(3, pieces=4))).chunks == 3


@pytest.mark.parametrize("name", PLANS)
def test_no_step_can_be_left_out(file, name):
    """Each mutant is refused by its place, its gpu and what is wrong; silent steps may go."""
    seen = 0
    for mutant in without_a_step(name):
        said = refused(file(mutant, name))
        assert re.search(r"gpu.*\d", said), said
        assert re.search(r"line \d+ \(gpu|gpus\[\d\]\.threadblocks|ends without", said), said
        seen += 1
    assert seen >= 6


def without_a_step(name):
    text = PLANS[name]
    if name.endswith(".xml"):
        lines = text.splitlines()
        for at in [i for i, line in enumerate(lines) if line.startswith("<step")]:
            rest = [*lines[:at], *lines[at + 1 :]]
            yield _numbered("\n".join(rest))
        return
    for gpu in (0, 1):
        for block, found in enumerate(json.loads(text)["gpus"][gpu]["threadblocks"]):
            for at, operation in enumerate(
                found["ops"][: 4 if name == "by_reading.json" else None]
            ):
                if operation["name"] != "nop":  # the last signals only end the plan
                    content = json.loads(text)
                    del content["gpus"][gpu]["threadblocks"][block]["ops"][at]
                    yield json.dumps(content)


def _numbered(text):
    """Steps count from 0 in each thread block."""
    number = 0
    lines = []
    for line in text.splitlines():
        if line.startswith("<step"):
            line = re.sub(r's="\d+"', f's="{number}"', line, count=1)
        number = number + 1 if line.startswith("<step") else 0
        lines.append(line)
    return "\n".join(lines)


RING, SCRATCH = PLANS["ring.xml"], PLANS["in_scratch.xml"]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('type="rrs" srcbuf="i" srcoff="3"', 'type="rrs" srcbuf="i" srcoff="2"',
         r"line 5 \(gpu 0, thread block 0, step 1\) adds chunk 2 to chunk 3$"),
        ('<tb id="0" send="1"', '<tb id="0" send="2"',
         r" waits for a message of gpu \d to gpu \d over channel 0, which never comes$"),
        ('send="1"', 'send="0"', r"line 4 .* type 's', and its thread block has send=0$"),
        ('srcoff="0"', 'srcoff="4"',
         r"line 4 \(.*\): there is no i\[4\] on gpu 0, whose i has 4 chunks$"),
        ('"rcs"', '"rcx"', r"line 8 \(gpu 0, .*step 4\): type 'rcx' is not one of s, r,"),
        ('coll="allreduce"', 'coll="x"', r"line 1: the collective 'x' is not one of allred"),
        ('ngpus="4"', 'ngpus="5"', r"line 1: ngpus=5, and the ids of its gpus are \[0, 1, 2"),
        (' cnt="1"', ' cnt="one"', r"line 4: cnt='one' is no number$"),
        ('<algo name="mine"', "<algo", r"line 1: <algo> has no name$"),
        ("<gpu id", "<op/><gpu id", r"line 2: <op> in <algo> is not of an MSCCLang plan$"),
        (' cnt="1"', f' cnt="{10**12}"', r"line 4 \(gpu 0, .*\): cnt=10{12}: it is"),
        ('perloop="4"', 'perloop="99999999"', r"line 1: it has 99999999 chunks on each of 4 gpus"),
        ('ngpus="4"', f'ngpus="{10**15}"', r"line 1: ngpus=10{15}, and the ids of its gpus are"),
    ],
)  # fmt: skip
def test_a_mutated_ring_is_refused_with_the_place(file, old, new, says):
    assert re.search(says, refused(file(RING.replace(old, new, 1))))


TWICE = step(1, "re", src=("s", 0))


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("</tb>", step(2, "re", src=("s", 0)) + "</tb>",  # by two thread blocks
         r"reads o\[0\] of gpu 0, and nothing puts it after line 6 \(gpu 0, .*, which writes it$"),
        ('</tb>\n<tb id="2"', TWICE + '</tb>\n<tb id="2"',
         r"line 9 \(.*step 1\) adds the contribution of gpu 1 to chunk 0 a second time$"),
        ('depid="0" deps="1"', 'depid="-1" deps="-1"',
         r"line 8 \(gpu 0, thread block 1, step 0\) reads s\[0\] of gpu 0, which holds nothing"),
        ('cnt="1" depid="-1" deps="-1"', 'cnt="1" depid="2" deps="0"',
         r"^thread blocks wait in a circle: line 4 .* waits for step 0 of thread block 2 of gpu 0"),
    ],
)  # fmt: skip
def test_a_mutated_plan_with_scratch_memory_is_refused_with_the_place(file, old, new, says):
    assert re.search(says, refused(file(SCRATCH.replace(old, new, 1))))


LOST = xml("allgather", 2, [[(1, 1, [step(0, "s", src=("o", 0))])], [(0, 0, [])]])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (RING[: len(RING) // 2], r"^line \d+: this is no whole XML"),
        ("", r"^line 1: this is no whole XML \(no element found\)$"),
        ("<html/>", r"^line 1: <html> at the top, where <algo> belongs is not of an MSCCLang"),
        (LOST, r"^line 4 \(gpu 0, .*step 0\) sends a message of gpu 0 to gpu 1 .*none receives"),
        (xml("allgather", 2, [[], []]), r"^gpu 0 ends without chunk 1: nothing writes o\[1\]"),
        (xml("allgather", 3, [[], []]), r"^line 1: all_gather: 3 chunks do not divide among 2"),
    ],
)
def test_what_is_no_plan_is_refused_with_the_place(file, text, says):
    assert re.search(says, refused(file(text)))


READING, OPERATION = PLANS["by_reading.json"], r"^gpus\[0\]\.threadblocks\[0\]\.ops\[3\]"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (READING[:-9], r"^line \d+: this is no whole JSON"),
        ("[]", r"^the plan has no 'gpus': this is no plan of mscclpp, or of another version$"),
        (READING.replace('"rres"', '"rest"'), OPERATION + r": there is no operation 'rest' in "),
        (READING.replace('"wait"', '"nop"', 1),
         OPERATION + r" \(rres\) reads o\[0\] of gpu 1, and nothing puts it after the beginning"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_json_is_said_with_its_place(file, text, says):
    assert re.search(says, refused(file(text, "plan.json")))


@pytest.mark.parametrize("name", ["by_reading.json", "by_packets.json"])
def test_any_part_of_json_may_be_missing_or_odd(file, name):
    """It is refused in a line, or means the same."""

    def parts(found, path=()):
        for key in found if isinstance(found, dict) else range(len(found)):
            yield *path, key
            if isinstance(found[key], dict | list):
                yield from parts(found[key], (*path, key))

    for path in [path for path in parts(json.loads(PLANS[name])) if path[:2] != ("gpus", 1)]:
        for odd in (None, -1, 7, [], "missing"):
            content = json.loads(PLANS[name])
            around = content
            for key in path[:-1]:
                around = around[key]
            if odd == "missing":
                del around[path[-1]]
            else:
                around[path[-1]] = odd
            try:
                plans.schedule_of_file(file(json.dumps(content), "plan.json"))
            except plans.PlanError as problem:
                assert "\n" not in str(problem)


def test_a_right_plan_without_moves_says_so(file):
    """Gpu 1 passes on what gpu 0 has, and needs its own afterwards."""
    hop = xml("allreduce", 1, [
        [(1, -1, [step(0, "s")]), (-1, 2, [step(0, "r", after=(0, 0))])],
        [(2, 0, [step(0, "r", dst=("s", 0)), step(1, "s", src=("s", 0)), step(2, "s")]),
         (-1, 2, [step(0, "nop"), step(1, "r", after=(0, 2))])],
        [(-1, 1, [step(0, "r", dst=("s", 0)), step(1, "rrc"), step(2, "re", src=("s", 0))]),
         (1, -1, [step(0, "s", after=(0, 2))]), (0, -1, [step(0, "s", after=(0, 2))])],
    ], scratch=1)  # fmt: skip
    hop = hop.replace('recv="2" chan="1"', 'recv="2" chan="2"', 1)
    path = file(hop)
    plans.prove(plans.read(path))
    with pytest.raises(
        plans.NotMoves, match=r"the plan is right, and no list of moves.*chunk 0 in scratch"
    ):
        plans.schedule_of_file(path)


def test_plans_run_wherever_own_algorithms_do(file, capsys, monkeypatch, tmp_path):
    path = str(file(SCRATCH))
    gather = str(file(plan_files.gather(2, pieces=2), "gather.xml"))

    def body(comm):
        total = np.full(5, comm.rank + 1.0)
        comm.all_reduce(total, algorithm=path)
        assert total.tolist() == [3.0] * 5
        parts = np.zeros(6)
        comm.all_gather(parts, np.full(3, comm.rank + 1.0), algorithm=gather)
        assert parts.tolist() == [1.0] * 3 + [2.0] * 3

    dpcore.spawn(body, 2, mode="threads")
    assert schedule_of(path, "all_reduce", 2).chunks == 2
    with pytest.raises(dpcore.Unsupported, match=r"for 3 ranks: it is a schedule for 2 ranks$"):
        schedule_of(path, "all_reduce", 3)
    with pytest.raises(dpcore.Unsupported, match=r"it is for all_gather, not for all_reduce"):
        schedule_of(gather, "all_reduce", 2)
    monkeypatch.chdir(tmp_path)
    assert main(["show", path]) == 0
    assert "all_reduce by mine: world 2, chunks 2, ordered" in capsys.readouterr().out
    assert (tmp_path / "plan.html").exists()
    assert main(["show", str(file(PLANS["by_packets.json"], "packets.json"))]) == 0
    assert main(["show", str(file(plan_files.ring(9), "nine.xml"))]) == 0
    said = capsys.readouterr().out
    assert "world 9, chunks 9, not ordered\n  step 0\n" in said
    assert said.endswith("no page: 9 chunks on 9 ranks are more than one can follow\n")
    assert main(["show", str(file(RING[:900], "cut.xml"))]) == 2
    assert re.search(r"cut\.xml, line \d+: this is no whole XML", capsys.readouterr().err)
    assert main(["bench", "--algorithm", "no.xml"]) == 2
    assert "there is no file no.xml" in capsys.readouterr().err
