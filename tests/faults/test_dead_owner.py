"""An owner dies, or gives up, once it has given its memory to be read, and before the others have
read it."""

import re
import signal
import sys
import time

import cloudpickle
import pytest
import torch

import dpcore as dp
from dpcore.comm.launch.spawn import run_processes

cloudpickle.register_pickle_by_value(sys.modules[__name__])

OWNER = 1
ELEMENTS = 1 << 17  # of a piece; long enough to be read, whatever the collective


def give(comm, collective):
    part, whole = torch.ones(ELEMENTS), torch.ones(ELEMENTS * comm.world_size)
    if collective == "broadcast":
        comm.broadcast(whole, OWNER)  # more than a stage holds, or its owner is through at once
    elif collective == "scatter":
        comm.scatter(part, whole if comm.rank == OWNER else None, OWNER)
    elif collective == "all_gather":
        comm.all_gather(whole, part)
    else:
        comm.all_to_all(whole, torch.ones_like(whole))


def body(comm, collective):
    comm.barrier()
    began = time.monotonic()  # not before: ranks start slowly where others start as well
    if comm.rank == OWNER:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        give(comm, collective)
    except dp.PeerLost as error:
        return str(error), time.monotonic() - began
    return "nothing was raised", 0.0


@pytest.mark.parametrize("collective", ["broadcast", "scatter", "all_gather", "all_to_all"])
def test_readers_hear_of_its_death(collective):
    reader, owner = run_processes(
        body,
        2,
        (collective,),
        timeout=20.0,
        environment={"DPCORE_FAULT": "delay=300:rank0:op1:middle"},
    )
    assert owner.exit_code == -signal.SIGALRM
    assert reader.error is None, reader.traceback
    assert re.search(rf"rank {OWNER} \(process \d+\) died and is needed", reader.result[0]), (
        reader.result
    )
    assert reader.result[1] < 10


def give_up(comm, collective):
    """The owner's own memory is in the arena, so it is read where it lies."""
    mine = comm.empty(ELEMENTS).fill_(1) if comm.rank == OWNER else torch.ones(ELEMENTS)
    whole = torch.ones(2 * ELEMENTS) if comm.rank == 0 else None
    calls = {
        "broadcast": lambda **timeout: comm.broadcast(mine, OWNER, **timeout),
        "gather": lambda **timeout: comm.gather(whole, mine, 0, **timeout),
        "reduce": lambda **timeout: comm.reduce(mine, 0, **timeout),
    }
    comm.barrier()
    try:
        calls[collective](**({"timeout": 0.1} if comm.rank == OWNER else {}))
    except dp.Error as error:
        mine.zero_()  # it is the program's again
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize("collective", ["broadcast", "gather", "reduce"])
def test_readers_hear_that_it_has_given_up(collective):
    outcomes = run_processes(
        give_up,
        2,
        (collective,),
        timeout=20.0,
        environment={"DPCORE_FAULT": "delay=400:rank0:op1:middle"},
    )
    reader, owner = (outcome.result for outcome in outcomes)
    assert "was not complete after 0.1 s" in owner, owner
    assert reader.startswith("rank 0: told by rank 1: ") and "0.1 s" in reader, reader
