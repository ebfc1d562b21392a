"""Ranks join a job under dp.elastic: to the bits of a run without processes, whatever dies.

The ranks of a test are started together. The last ones join: the others let them begin at a step,
and wait there until they have knocked.
"""

import os
import shutil
import socket
import sys
import tempfile
import time
import uuid
from pathlib import Path

import cloudpickle
import pytest
import torch
from torch import nn

import dpcore as dp
from dpcore.comm.launch.door import Door, Invitation, Place, first_difference, knock
from dpcore.comm.launch.spawn import RemoteTraceback, run_processes
from dpcore.ddp.elastic.run import ElasticRun
from tests.faults import elastic_training
from tests.faults.elastic_training import check, die, train

for module in (sys.modules[__name__], elastic_training):
    cloudpickle.register_pickle_by_value(module)

WAITED_FOR = 120.0  # until a rank has knocked, on a machine that is very busy


def waited(is_so):
    ends_at = time.monotonic() + WAITED_FOR
    while not is_so():
        assert time.monotonic() < ends_at, "a rank has not come"
        time.sleep(0.005)


def lowest(run):
    return run.comm.rank == 0


def joined(
    founders, joiners, places=None, *, waits=((3, 1),), dead=(), transport="shm", faults="",
    before=None, first=None, door=None, died=-9, cap=0.0005, trains=train, hosts="",
):  # fmt: skip
    """Runs the ranks. ``waits``: at such a step the ranks wait until so many others have come to
    the door, or in, or one was refused. ``first(comm, number, door)`` is what a joiner does instead
    of training. Returns what the ranks that live have reported, by their numbers in the job."""
    name = f"joining-{uuid.uuid4().hex}"
    place = door or str
    at_port = str(place(name)).startswith("tcp:")  # where any rank of the host may listen
    wanted = dict(waits)
    begins = tempfile.mkdtemp()  # a file for each step that was reached

    def body(comm):
        number = comm.rank
        dp.finalize()
        late = number >= founders
        if late:
            step = next((s for s, count in waits if number - founders < count), None)
            waited(lambda: step is None or os.path.exists(f"{begins}/{step}"))
            comm = dp.init(join=True, timeout=60.0)
        else:
            comm = dp.init(
                rank=number, world_size=founders, init_method=name, transport=transport,
                timeout=60.0,
            )  # fmt: skip

        numbers = []  # of this rank in the job: two that join at once may come in any order

        def prepare(run, own):
            numbers.append(run.number)
            if before is not None:
                before(run, own)
            batches = run.batches

            def waiting(loader):
                for batch in batches(loader):
                    wait(run)
                    yield batch

            run.batches = waiting

        def wait(run):
            has_door = run._door._listener is not None
            if (count := wanted.pop(run.step, 0)) and (has_door or (not at_port and lowest(run))):
                Path(begins, str(run.step)).touch()

                def are_here():
                    run._door.open(run.comm)
                    came = run._next_number - founders + len(run._door._waiting) >= count
                    return came or os.path.exists(f"{begins}/was told")

                waited(are_here)

        if late and first is not None:
            said = first(comm, number, name)
            Path(begins, "was told").touch()
            return number, said
        done = trains(
            comm, places or {}, prepare, door=place(name), late=number if late else None, cap=cap
        )
        return (*numbers, done)

    outcomes = run_processes(
        body,
        founders + joiners,
        timeout=60.0,
        environment={"DPCORE_SECRET": "only ours"}
        | ({"DPCORE_FAULT": faults} if faults else {})
        | ({"DPCORE_PRETEND_HOSTS": hosts} if hosts else {}),
        deadline=240.0,
        grace=200.0,
    )
    shutil.rmtree(begins)
    for outcome in outcomes:
        wanted_code = died if outcome.rank in dead else 0
        if outcome.error is not None and outcome.rank not in dead:
            raise outcome.error from RemoteTraceback(outcome.traceback)
        assert outcome.exit_code == wanted_code, outcome
    return dict(one.result for one in outcomes if one.rank not in dead)


def trained(outcomes, founders):
    """What they have reported is right. Returns the ranks of each step."""
    return check(outcomes, founders)


@pytest.mark.parametrize("step", (0, 3, 10))  # the first, one in the middle, an epoch's last one
def test_a_rank_joins(step):
    ranks = trained(joined(2, 1, waits=[(step, 1)]), 2)
    assert ranks[step] == (0, 1) and ranks[step + 1] == (0, 1, 2)


def test_a_rank_joins_where_the_first_steps_have_chosen_other_buckets():
    ranks = trained(joined(2, 1, waits=[(7, 1)], cap=None), 2)
    assert ranks[7:9] == [(0, 1), (0, 1, 2)]


def a_store(path):
    return torch.distributed.FileStore(path)


@pytest.mark.parametrize("kind", ("tcp", "file", "store"))
def test_a_rank_joins_over_tcp(kind, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = str(tmp_path / "door")
    door = {
        "tcp": lambda name: f"tcp://127.0.0.1:{port}",
        "file": lambda name: f"file://{path}",
        "store": lambda name: a_store(path),
    }[kind]
    ranks = trained(joined(2, 1, transport="tcp", door=door), 2)
    assert ranks[3:5] == [(0, 1), (0, 1, 2)]
    assert kind == "store" or not os.path.exists(path)


def test_a_rank_joins_where_those_that_live_share_a_host_and_it_is_on_another(tmp_path):
    """They need no network, and their door does."""
    path = tmp_path / "door"
    opened = []

    def before(run, own):
        publish = run._door._place.publish
        run._door._place.publish = lambda address: (opened.append(address), publish(address))

    def trains(*given, **named):
        return *train(*given, **named), tuple(opened)

    outcomes = joined(
        3, 1, {(2, "in backward"): (0,)}, waits=[(5, 1)], dead=(0,), transport="shm+tcp",
        door=lambda name: f"file://{path}", hosts="a,b,b,a", before=before, trains=trains,
    )  # fmt: skip
    doors = {number: done[3] for number, done in outcomes.items()}
    assert [address.startswith("127.0.0.1:") for address in doors[1]] == [True], doors
    ranks = trained({number: done[:3] for number, done in outcomes.items()}, 3)
    assert ranks[3] == (1, 2) and ranks[-1] == (1, 2, 3)


def test_a_rank_joins_one_that_is_alone():
    ranks = trained(joined(1, 1), 1)
    assert ranks[3:5] == [(0,), (0, 1)]


def test_two_join_at_once_and_another_one_later():
    ranks = trained(joined(2, 3, waits=[(2, 2), (5, 3)]), 2)
    assert ranks[3] == (0, 1, 2, 3) or ranks[2:4] == [(0, 1), (0, 1, 2)]
    assert ranks[-1] == (0, 1, 2, 3, 4)


def test_a_rank_dies_and_one_joins_in_its_place():
    places = {(2, "in backward"): (0,)}
    ranks = trained(joined(3, 1, places, waits=[(5, 1)], dead=(0,)), 3)
    assert ranks[2] == (1, 2) and ranks[-1] == (1, 2, 3)


@pytest.mark.parametrize(
    ("victim", "step"),
    [(victim, step) for victim in (0, 1) for step in range(7) if (victim, step) != (1, 2)],
)  # only the lowest rank proposes
def test_a_rank_dies_while_another_one_joins(victim, step):
    """At each moment of the agreement. Rank 0 has the door: without it the joiner knocks again."""
    faults = f"kill:rank{victim}:op{step}:shrink"
    outcomes = joined(3, 1, waits=[(3, 1), (6, 1)], dead=(victim,), faults=faults)
    rest = tuple(rank for rank in range(3) if rank != victim)
    assert trained(outcomes, 3)[-1] == (*rest, 3)


def dies_with_the_state(comm, number, name):
    """It has met the others, and has not got the state."""
    ElasticRun._take = lambda *_: die()
    return train(comm, {}, door=name, late=number)


def dies_at_the_meeting(comm, number, name):
    Invitation.accept = lambda *_: die()
    return train(comm, {}, door=name, late=number)


@pytest.mark.parametrize("how", (dies_at_the_meeting, dies_with_the_state))
def test_a_joiner_dies(how):
    outcomes = joined(2, 1, dead=(2,), first=how)
    assert trained(outcomes, 2)[-1] == (0, 1)


def another_model(comm, number, name):
    module = nn.Linear(6, 1)
    samples = elastic_training.data()
    sampler = torch.utils.data.DistributedSampler(samples, 1, 0, seed=1)
    model = dp.DataParallel(module)
    optimizer = torch.optim.AdamW(module.parameters())
    with pytest.raises(dp.Mismatch) as problem, dp.elastic(model, optimizer, sampler, door=name):
        pass
    return str(problem.value)


def test_a_joiner_with_another_model_is_told_so_and_the_others_go_on():
    outcomes = joined(2, 1, first=another_model)
    said = outcomes.pop(2)
    assert "the job has the parameter 0.weight [40, 6]" in said
    assert "this rank has the parameter weight [1, 6]" in said
    assert trained(outcomes, 2)[-1] == (0, 1)


# ---- the door alone --------------------------------------------------------------------------


def test_over_tcp_a_secret_is_required(monkeypatch):
    monkeypatch.delenv("DPCORE_SECRET", raising=False)
    monkeypatch.delenv("DPCORE_SECRET_FILE", raising=False)
    comm = dp.init(rank=0, world_size=1)
    try:
        with pytest.raises(dp.Unsupported, match="DPCORE_SECRET"):
            Door(Place("tcp://127.0.0.1:1"), []).open(comm)
    finally:
        dp.finalize()


def test_a_joiner_with_another_secret_is_refused(monkeypatch):
    monkeypatch.setenv("DPCORE_SECRET", "of the job")
    comm = dp.init(rank=0, world_size=1)
    door = Door(Place("tcp://127.0.0.1:0"), [])
    try:
        door.open(comm)
        port = door._listener.getsockname()[1]
        monkeypatch.setenv("DPCORE_SECRET", "guessed")
        with pytest.raises(dp.Mismatch, match="another secret"):
            knock(Place(f"tcp://127.0.0.1:{port}"), [], 5.0)
        assert door.count() == 0
    finally:
        door.close()
        dp.finalize()


def test_where_no_job_answers_it_says_so():
    with pytest.raises(dp.RendezvousError, match="no job has answered at the door 'nobody'"):
        knock(Place("nobody"), [], 0.01)


def test_what_differs_is_named():
    assert first_difference(["a"], ["a", "b"]) == "the job has no b, and this rank has it"
    assert first_difference(["a", "b"], ["a"]) == "the job has b, and this rank has nothing there"
    assert first_difference(["a"], ["a"]) == ""
