"""What an operation ran, from the core into the file, and from there to what the stepper draws."""

import json

import numpy as np
import pytest

import dpcore as dp
from dpcore import reference
from dpcore.recorder import file as trace_file
from dpcore.tools.show import read_run
from dpcore.tools.show.page import page_text
from dpcore.tools.show.schedules import DrawnSchedules, steps_of

from .traces import says_nothing, write_trace


def what_ran(t):
    """By name and size: (path, root, world) of the operations of a trace."""
    return {(e.name, e.bytes): (e.path, e.root, e.world) for e in t.events if e.kind == "operation"}


def traced(world, path, **options):
    """The whole variety, over any transport: what each rank's trace says, and the communicator's
    choice for the large buffer."""

    def body(comm):
        large, small = np.ones(20_000, np.float32), np.ones(100, np.float32)
        own = dp.schedule("tree", "all_reduce", comm.world_size)
        own = dp.Schedule("my own", "all_reduce", own.world, own.chunks, own.moves)
        group = comm.split(comm.rank // 2, comm.rank)
        with dp.trace(path, comm=comm) as t:
            comm.all_reduce(large)
            comm.all_reduce(small)
            comm.all_reduce(np.ones(20_001, np.float32), algorithm=own)
            comm.all_reduce(np.ones(20_002, np.float32), algorithm="halving_doubling")
            comm.broadcast(np.ones(20_003, np.float32), 1, algorithm="tree")
            group.all_reduce(np.ones(20_004, np.float32), algorithm="ring")
            comm.barrier()
        return what_ran(t), comm.explain(large.nbytes)["all_reduce"].algorithm

    return dp.spawn(body, world, **options)


def test_over_tcp_each_operation_knows_its_algorithm(tmp_path):
    path = tmp_path / "run.json"
    for ran, chosen in traced(3, path, transport="tcp"):
        assert ran["all_reduce", 80_000] == (f"{chosen}/moves", -1, 3)
        assert ran["all_reduce", 400] == ("one_shot/stage", -1, 3)
        assert ran["all_reduce", 80_004] == ("my own/moves", -1, 3)
        assert ran["all_reduce", 80_008] == ("halving_doubling/moves", -1, 3)
        assert ran["broadcast", 80_012] == ("tree/moves", 1, 3)
        assert ran["barrier", 0][0] == "barrier"
    run = read_run(path)
    worlds = [{e.world for e in rank.operations if e.bytes == 80_016} for rank in run.ranks]
    assert worlds == [{2}, {2}, {1}]
    assert {entry["algorithm"] for entry in run.schedules.values()} == {
        chosen, "my own", "halving_doubling", "tree", "ring",
    }  # fmt: skip
    drawn = DrawnSchedules([run])
    for event in run.ranks[0].operations:
        place = drawn.drawing_of(run, event)
        if event.name == "barrier":
            assert place == ()
            continue
        world, collective, name, ranks = place
        steps = drawn.content[world][collective]["algorithms"][name]
        assert (int(world), collective, ranks) == (event.world, event.name, event.world)
        assert name.startswith(event.path.split("/")[0])
        built_in = "tree" if name == "my own" else event.path.split("/")[0]
        plan = reference.make_schedule(built_in, event.name, event.world, max(0, event.root))
        assert steps == {**steps_of(plan), "ran": True}


def test_a_ring_over_tcp_is_called_a_ring(tmp_path):
    """Two ranks, as most traces of a laptop have."""

    def body(comm, path):
        with dp.trace(path, comm=comm) as t:
            comm.all_reduce(np.ones(20_000, np.float32), algorithm="ring")
            comm.all_reduce(np.ones(20_001, np.float32), algorithm="recursive_doubling")
        return what_ran(t)

    path = tmp_path / "run.json"
    for ran in dp.spawn(body, 2, path, transport="tcp"):
        assert ran["all_reduce", 80_000][0] == "ring/moves"
        assert ran["all_reduce", 80_004][0] == "recursive_doubling/moves"
    args = [e["args"] for e in json.loads(path.read_text())["traceEvents"] if "args" in e]
    assert "ring/moves" in {a.get("path") for a in args}


@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_in_shared_memory_each_operation_knows_its_path(tmp_path, mode):
    def body(comm):
        x = comm.empty(20_000)
        x.fill_(1.0)
        ordinary = np.ones(20_001, np.float32)
        with dp.trace(comm=comm) as t:
            comm.all_reduce(x)
            comm.all_reduce(ordinary)
            comm.broadcast(ordinary, 1)
            comm.all_reduce(np.ones(20_002, np.float32), algorithm="ring")
        return what_ran(t)

    for ran in dp.spawn(body, 2, mode=mode):
        assert ran["all_reduce", 80_000] == ("two_shot/push", -1, 2)
        assert ran["all_reduce", 80_004] == ("two_shot/stage", -1, 2)
        assert ran["broadcast", 80_004] == ("direct/stage", 1, 2)
        assert ran["all_reduce", 80_008] == ("ring/moves", -1, 2)


def test_more_lists_of_moves_than_are_kept_are_not_called_anything(tmp_path):
    def body(comm):
        base = dp.schedule("ring", "all_reduce", 2)
        with dp.trace(comm=comm) as t:
            for n in range(70):
                own = dp.Schedule(f"own {n}", "all_reduce", 2, base.chunks, base.moves)
                comm.all_reduce(np.ones(10, np.float32), algorithm=own)
        with dp.trace(comm=comm) as again:
            comm.all_reduce(np.ones(10, np.float32), algorithm=own)
        return [[e.path for e in x.events if e.kind == "operation"] for x in (t, again)]

    for paths, again in dp.spawn(body, 2, mode="threads"):
        assert paths == [f"own {n}/moves" for n in range(64)] + ["moves"] * 6
        assert again == ["own 69/moves"]


# ---- from the file to the page -----------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["ring", "two_shot", "tree"])
def test_the_stepper_ends_with_the_sum_everywhere(algorithm):
    steps = steps_of(reference.make_schedule(algorithm, "all_reduce", 4))
    expected = {chunk: sum(r + 1 + 10 * chunk for r in range(4)) for chunk in range(64)}
    last = steps["states"][-1]
    assert len(last) == 4 * steps["chunks"]
    assert all(value == expected[chunk] for _, chunk, value, _ in last)
    assert all(contributors == 4 for *_, contributors in last)
    assert len(steps["moves"]) == len(steps["states"]) - 1


def test_the_stepper_shows_what_ran_first(tmp_path):
    run = read_run(write_trace(tmp_path / "run.json", buckets=3))
    entry = DrawnSchedules([run]).content["2"]["all_reduce"]
    assert entry["first"] == "ring"  # two of three
    ran = {name for name, steps in entry["algorithms"].items() if steps.get("ran")}
    assert ran == {"ring", "two_shot"}
    assert set(entry["algorithms"]) > ran | {"one_shot", "tree"}


def test_an_earlier_file_is_drawn_without_a_claim(tmp_path):
    path = write_trace(
        tmp_path / "run.json", ran=says_nothing, paths={"all_reduce": {"two_shot/push": 6}}
    )
    run = read_run(path)
    drawn = DrawnSchedules([run])
    entry = drawn.content["2"]["all_reduce"]
    assert entry["first"] == "two_shot"
    assert not any(steps.get("ran") for steps in entry["algorithms"].values())
    assert {drawn.drawing_of(run, e) for e in run.ranks[0].operations} == {()}
    assert '"path":"two_shot/push"' in page_text([run])
    several = {"all_reduce": {"two_shot/push": 4, "one_shot/stage": 2}}
    run = read_run(write_trace(tmp_path / "run.json", ran=says_nothing, paths=several))
    assert '"path":' not in page_text([run])


def test_what_is_too_large_is_drawn_smaller_and_says_so(tmp_path):
    run = read_run(write_trace(tmp_path / "run.json", ranks=12, steps=1))
    drawn = DrawnSchedules([run])
    ring, two_shot = (drawn.drawing_of(run, event) for event in run.ranks[0].operations)
    assert ring == ("8", "all_reduce", "ring", 12)
    assert two_shot == ("8", "all_reduce", "two_shot", 12)


def test_a_list_that_is_wrong_is_not_drawn(tmp_path):
    path = write_trace(tmp_path / "run.json")
    content = json.loads(path.read_text())
    for entry in content["otherData"]["schedules"].values():
        entry["moves"].pop()
    path.write_text(json.dumps(content))
    run = read_run(path)
    drawn = DrawnSchedules([run])
    ring, two_shot, *_ = (drawn.drawing_of(run, event) for event in run.ranks[0].operations)
    assert ring == () and two_shot == ("2", "all_reduce", "two_shot", 2)


def test_two_of_one_name_are_both_drawn(tmp_path):
    """A schedule of one's own may be called like one of the package."""
    first = write_trace(tmp_path / "a.json")
    content = json.loads(first.read_text())
    tree = trace_file.describe(reference.make_schedule("tree", "all_reduce", 2))
    content["otherData"]["schedules"] = {
        number: {**tree, "algorithm": "ring"} for number in content["otherData"]["schedules"]
    }
    second = tmp_path / "b.json"
    second.write_text(json.dumps(content))
    runs = [read_run(first), read_run(second)]
    drawn = DrawnSchedules(runs)
    places = [drawn.drawing_of(run, run.ranks[0].operations[0])[2] for run in runs]
    assert places == ["ring", "ring 2"]
