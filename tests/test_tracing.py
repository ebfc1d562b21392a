"""dpcore.trace: what the file and the numbers say about runs whose course is known."""

import fcntl
import json
import os
import random
import sys
import time

import cloudpickle
import numpy as np
import pytest

import dpcore as dp
from dpcore.comm.launch.spawn import run_processes, run_threads
from dpcore.recorder import joining
from dpcore.recorder.file import Event, assign_lanes
from dpcore.tools.show import read_run

# The functions here travel to ranks that can't import this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

MODES = ["threads", "processes"]


def read_json(path):
    return json.loads(path.read_text())


def spans_of(content, **wanted):
    spans = [entry for entry in content["traceEvents"] if entry["ph"] == "X"]
    return [span for span in spans if all(span[key] == value for key, value in wanted.items())]


def assert_properly_nested(content):
    """In each track a span lies inside another one or beside it: viewers show nothing else."""
    tracks = {}
    for span in spans_of(content):
        tracks.setdefault((span["pid"], span["tid"]), []).append(span)
    assert tracks
    for spans in tracks.values():
        open_until = []
        for span in sorted(spans, key=lambda span: (span["ts"], -span["dur"])):
            end = span["ts"] + span["dur"]
            while open_until and open_until[-1] <= span["ts"] + 1e-4:
                open_until.pop()
            assert not open_until or end <= open_until[-1] + 1e-4
            open_until.append(end)


@pytest.mark.parametrize("mode", MODES)
def test_messages_name_the_other_rank_also_in_a_group(tmp_path, mode):
    """By its number among the ranks that are traced, and not by that in the group."""

    def work(comm, path):
        group = comm.split(comm.rank % 2)  # ranks 0 and 2, 1 and 3
        got, way = np.empty(4, np.float32), comm.rank ^ 2
        with dp.trace(path, comm=comm) as t:
            sent = group.send(np.ones(4, np.float32), 1 - group.rank, tag=7, async_op=True)
            group.recv(got, 1 - group.rank, tag=7)
            sent.wait()
        messages = [e for e in t.events if e.kind == "operation" and e.name in ("send", "recv")]
        assert sorted((e.name, e.peer, e.operation) for e in messages) == [
            ("recv", way, 7), ("send", way, 7),
        ]  # fmt: skip

    path = tmp_path / "run.json"
    dp.spawn(work, 4, path, mode=mode)
    (sent,) = spans_of(read_json(path), name="send", pid=1, cat="operation")
    assert sent["args"] == sent["args"] | {"operation": 7, "bytes": 16, "peer": 3}


@pytest.mark.parametrize("mode", MODES)
def test_one_file_shows_all_ranks(tmp_path, mode):
    def work(comm, path):
        values = np.ones(1000, np.float32)
        with dp.trace(path) as t:
            for _ in range(5):
                comm.all_reduce(values)
            comm.barrier()
            with t.span("forward"):
                pass
            t.mark("epoch 3")
        assert [event.kind for event in t.events].count("operation") == 6
        assert t.by_operation()["all_reduce"]["count"] == 5
        assert t.by_operation()["all_reduce"]["bytes"] == 5 * 4000
        assert t.exposed_ms > 0
        operations, exposed = (
            {event.operation: event for event in t.events if event.kind == kind}
            for kind in ("operation", "exposed")
        )
        assert operations.keys() == exposed.keys()
        for number, operation in operations.items():  # it is waited for until after its end
            assert operation.begin_ns <= exposed[number].begin_ns
            assert operation.end_ns <= exposed[number].end_ns
        assert t.dropped == 0
        return t.path

    path = tmp_path / "run.json"
    assert dp.spawn(work, 2, path, mode=mode) == [path, None]
    content = read_json(path)
    assert {entry["pid"] for entry in content["traceEvents"]} == {0, 1}
    for rank in (0, 1):
        reduces = spans_of(content, pid=rank, cat="operation", name="all_reduce")
        assert [span["args"]["operation"] for span in reduces] == [0, 1, 2, 3, 4]
        assert {span["args"]["bytes"] for span in reduces} == {4000}
        assert len(spans_of(content, pid=rank, cat="operation", name="barrier")) == 1
        assert len(spans_of(content, pid=rank, cat="exposed")) == 6
        assert len(spans_of(content, pid=rank, cat="compute", name="forward")) == 1
    marks = [entry for entry in content["traceEvents"] if entry["ph"] == "i"]
    assert [mark["name"] for mark in marks] == ["epoch 3", "epoch 3"]

    times = [entry["ts"] for entry in content["traceEvents"] if entry["ph"] != "M"]
    assert min(times) == 0
    assert all(span["dur"] >= 0 for span in spans_of(content))
    began = content["baseTimeNanoseconds"] * 1e-9
    assert time.time() - 60 < began < time.time()
    assert content["distributedInfo"] == {"backend": "native", "world_size": 2}
    assert content["otherData"]["version"] == dp.__version__
    assert content["otherData"]["machine"]["processors"] > 0
    assert content["otherData"]["dropped"] == {"0": 0, "1": 0}
    assert_properly_nested(content)


def test_tracks_have_names(tmp_path):
    def work(comm, path):
        with dp.trace(path):
            comm.all_reduce(np.ones(1000), async_op=True).wait()
            works = [comm.all_reduce(np.ones(1 << 20), async_op=True)]
            time.sleep(0.05)
            works[0].wait()

    dp.spawn(work, 2, tmp_path / "run.json")
    entries = read_json(tmp_path / "run.json")["traceEvents"]
    named = {
        (entry["pid"], entry["tid"]): entry["args"]["name"]
        for entry in entries
        if entry["name"] == "thread_name"
    }
    assert {(entry["pid"], entry["tid"]) for entry in entries if entry["ph"] == "X"} <= set(named)
    assert {"main", "operations"} <= set(named.values())
    processes = [entry for entry in entries if entry["name"] == "process_name"]
    assert [entry["args"]["name"].split(" (")[0] for entry in processes] == ["rank 0", "rank 1"]


@pytest.mark.alone
@pytest.mark.parametrize("mode", MODES)
def test_a_late_rank_is_exposed_time_of_the_others(mode):
    def work(comm):
        values = np.ones(1000)
        comm.barrier()
        with dp.trace() as t:
            with t.span("compute"):
                time.sleep(0.15 if comm.rank == 1 else 0)
            comm.all_reduce(values)
        return t.events, t.exposed_ms, t.by_wait()

    (events, exposed_ms, by_wait), (of_late_rank, *_) = dp.spawn(work, 2, mode=mode)
    (exposed,) = (event for event in events if event.kind == "exposed")
    (late,) = (event for event in of_late_rank if event.kind == "operation")
    # All ranks share a clock: from here to there the early rank had nobody to talk to. The sleep
    # is long so that a busy machine, on which the early one is late itself, leaves 50 ms of it.
    alone_ms = (late.begin_ns - exposed.begin_ns) * 1e-6
    assert alone_ms > 50
    assert exposed_ms >= alone_ms
    waits = [event for event in events if event.kind == "wait" and event.peer == 1]
    assert "every rank to enter" in {event.name for event in waits}
    assert by_wait["every rank to enter"] > 50
    assert exposed.begin_ns <= waits[0].begin_ns <= waits[0].end_ns <= exposed.end_ns


@pytest.mark.parametrize("mode", MODES)
def test_overlapping_operations_are_drawn_side_by_side(tmp_path, mode):
    def work(comm, path):
        buffers = [np.ones(300_000, np.float32) for _ in range(6)]
        with dp.trace(path) as t:
            for _ in range(3):
                works = [
                    comm.all_reduce(buffer, async_op=True, priority=priority)
                    for priority, buffer in enumerate(buffers)
                ]
                with t.span("compute"):
                    np.ones(300_000).sum()
                for started in works:
                    started.wait()

    dp.spawn(work, 2, tmp_path / "run.json", mode=mode)
    content = read_json(tmp_path / "run.json")
    assert_properly_nested(content)
    for rank in (0, 1):
        operations = spans_of(content, pid=rank, cat="operation")
        assert len(operations) == 18
        assert len({span["tid"] for span in operations}) > 1
        inside = {(span["tid"], span["args"]["operation"]) for span in operations}
        for wait in spans_of(content, pid=rank, cat="wait"):
            assert (wait["tid"], wait["args"]["operation"]) in inside
            assert wait["name"].startswith("wait for ")


def test_the_ring_keeps_the_newest_events_and_counts_the_others(tmp_path):
    def work(comm, path):
        with dp.trace(path, capacity=16) as t:
            for _ in range(100):
                comm.barrier()
            for step in range(100):
                t.mark(f"step {step}")
        operations = [event.operation for event in t.events if event.kind == "operation"]
        return t.dropped, len(t.events), operations, [e.name for e in t.events if e.kind == "mark"]

    for dropped, kept, operations, marks in dp.spawn(work, 2, tmp_path / "run.json"):
        assert kept == 32  # 16 of the core, 16 of the program
        assert dropped >= 2 * 100 + 100 - kept
        assert operations[-1] == 99
        assert operations == sorted(operations)
        assert marks == [f"step {step}" for step in range(84, 100)]
    assert min(read_json(tmp_path / "run.json")["otherData"]["dropped"].values()) >= 268


@pytest.mark.parametrize("run", [run_threads, run_processes])
def test_every_rank_writes_its_own_file_when_one_raises(tmp_path, run):
    def work(comm, path):
        with dp.trace(path):
            comm.barrier()
            if comm.rank == 1:
                time.sleep(1.0)  # so that a busy machine leaves 10 ms of the other one's wait
                raise ZeroDivisionError("a mistake")
            comm.all_reduce(np.ones(10))

    outcomes = run(work, 2, [tmp_path / "run.json"])
    assert [type(outcome.error) for outcome in outcomes] == [dp.PeerLost, ZeroDivisionError]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.rank0.json", "run.rank1.json"]
    victim = read_json(tmp_path / "run.rank0.json")
    assert "a mistake" in victim["otherData"]["error"]
    # The wait that it never came out of is what such a trace is for.
    (wait,) = spans_of(victim, cat="wait", name="wait for every rank to enter", pid=0)[-1:]
    assert wait["args"] == wait["args"] | {"operation": 1, "bytes": 80, "peer": 1}
    assert wait["dur"] > 10_000  # microseconds
    culprit = read_json(tmp_path / "run.rank1.json")
    assert culprit["otherData"]["error"] == "ZeroDivisionError: a mistake"
    assert {entry["pid"] for entry in culprit["traceEvents"]} == {1}


def test_an_error_that_was_dealt_with_leaves_a_trace_as_well(tmp_path):
    def work(comm, path):
        with dp.trace(path) as t:
            try:
                comm.all_reduce(np.ones(10 + comm.rank))
            except dp.Mismatch:
                time.sleep(0.05)
        return t.path

    paths = dp.spawn(work, 2, tmp_path / "run.json", mode="threads")
    assert paths == [tmp_path / "run.rank0.json", tmp_path / "run.rank1.json"]


def test_without_a_file_no_rank_needs_another(tmp_path):
    def work(comm):
        if comm.rank == 0:
            with dp.trace() as t:
                comm.barrier()
            return t.path, t.by_operation()["barrier"]["count"]
        comm.barrier()
        return None

    assert dp.spawn(work, 2, mode="threads") == [(None, 1), None]


def test_a_group_can_be_traced_alone(tmp_path):
    def work(comm, path):
        group = comm.split(comm.rank % 2)
        if comm.rank % 2 == 0:
            with dp.trace(path, comm=group):
                group.all_reduce(np.ones(3))
        comm.barrier()

    dp.spawn(work, 4, tmp_path / "even.json", mode="threads")
    content = read_json(tmp_path / "even.json")
    assert content["distributedInfo"]["world_size"] == 2
    assert len(spans_of(content, cat="operation")) == 2


def test_misuse_is_explained(tmp_path):
    with pytest.raises(dp.Error, match="there is no communicator"):
        dp.trace()
    comm = dp.init(rank=0, world_size=1)
    try:
        with dp.trace() as t:
            with pytest.raises(dp.Error, match="when its block has ended"):
                _ = t.events
            with pytest.raises(dp.Error, match="recording already"), dp.trace():
                pass
            comm.barrier()
        assert len(t.events) == 2
        with pytest.raises(dp.Error, match="records one block"), t:
            pass
        with pytest.raises(dp.Error, match="not recording"), t.span("late"):
            pass
        with pytest.raises(dp.Error, match="not recording"):
            t.mark("late")
        with pytest.raises(ValueError, match="at least one event"):
            dp.trace(capacity=0)
        with pytest.raises(FileNotFoundError, match="no directory"):
            dp.trace(tmp_path / "missing" / "run.json")
        unused = dp.trace()
    finally:
        dp.finalize()
    with pytest.raises(dp.Error, match="finalized"), unused:
        pass


def test_lanes_of_random_operations_nest():
    chance = random.Random(7)
    for _ in range(50):
        events = []
        for number in range(30):
            begin = chance.randrange(1000)
            end = begin + chance.randrange(300)
            events.append(Event("all_reduce", "operation", -1, 1, number, 8, begin, end))
            if end - begin > 4:
                inner = begin + 1, begin + 1 + chance.randrange(end - begin - 1)
                events.append(Event("a message", "wait", 0, 1, number, 8, *inner))
        lanes = assign_lanes(events)
        assert set(lanes) == set(range(len(events)))
        for lane in set(lanes.values()):
            inside = [events[index] for index in lanes if lanes[index] == lane]
            assert_lane_nests(inside)


def assert_lane_nests(events):
    for a in events:
        for b in events:
            if a is not b and a.kind == b.kind == "operation":
                assert a.end_ns <= b.begin_ns or b.end_ns <= a.begin_ns
            if a.kind == "operation" and b.kind == "wait" and a.operation != b.operation:
                assert b.end_ns <= a.begin_ns or a.end_ns <= b.begin_ns


def test_a_rank_does_not_wait_for_ever_for_a_lock_on_the_folder(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("DPCORE_TRACE", str(tmp_path / "run.json"))
    monkeypatch.setattr(joining, "_PATIENCE_SECONDS", 0.1)
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        dp.spawn(lambda comm: comm.barrier(), 2, mode="threads")
    finally:
        os.close(folder)
    said = capsys.readouterr().err
    own = [tmp_path / f"run.rank{rank}.json" for rank in range(2)]
    assert f"a lock (flock) on the folder {tmp_path} for 0.1 s" in said, said
    for rank, path in enumerate(own):
        assert f"run.json does not show rank {rank}; {path} does" in said, said
        assert read_run(path).world_size == 2
    dp.spawn(lambda comm: comm.barrier(), 2, mode="threads")
    assert set(tmp_path.iterdir()) == {*own, tmp_path / "run.json"}
