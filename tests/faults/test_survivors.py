"""Ranks die, and the others go on in a smaller communicator (Communicator.shrink).

Deaths are put at named points: in the middle of an operation, and at each step of shrink() itself
(csrc/comm/base/fault.h). tests/comm/test_agreement.py goes through the interleavings that no
program can be made to take.
"""

import os
import signal
import sys
from pathlib import Path

import cloudpickle
import pytest
import torch

import dpcore as dp
from dpcore.comm.launch.spawn import run_processes
from tests.comm.modes import MODES

cloudpickle.register_pickle_by_value(sys.modules[__name__])

FATAL = 30  # the operation in which ranks die; a later communicator makes fewer of them
STEPS = FATAL + 8
PATIENCE = 20.0  # for ranks that are only slow
TRANSPORTS = ("shm", "tcp")


def contribution(rank, step):
    return torch.arange(3000, dtype=torch.float32) * (rank + 1) + step


def reduce_all_steps(comm):
    """Every rank knows who took part: itself under its first number, and who shrink() names."""
    first = list(range(comm.world_size))
    own, seen, step = comm.rank, [], 0
    tensor = comm.empty(3000)
    while step < STEPS:
        tensor.copy_(contribution(own, step))
        try:
            comm.all_reduce(tensor)
        except (dp.PeerLost, dp.Timeout):
            comm = comm.shrink(PATIENCE)
            first = [first[rank] for rank in comm.survivors]
            assert first[comm.rank] == own and len(first) == comm.world_size
            assert comm is dp.current()
            seen.append((tuple(first), comm.completed_before))
            tensor = comm.empty(3000)
            step = min(all_of(comm, step))
            continue
        expected = contribution(first[0], step)
        for rank in first[1:]:
            expected += contribution(rank, step)
        assert torch.equal(tensor, expected), (own, step)
        step += 1
    try_everything(comm)
    return seen


def all_of(comm, number):
    """Another death may come first: then the next all-reduce finds it."""
    heard = torch.full((comm.world_size,), number)
    try:
        comm.all_gather(heard, torch.tensor([number]))
    except dp.PeerLost:
        return [number]
    return heard.tolist()


def try_everything(comm):
    world, rank = comm.world_size, comm.rank
    whole, own = torch.empty(world * 5), torch.full((5,), float(rank))
    comm.all_gather(whole, own)
    assert whole.view(world, 5)[:, 0].tolist() == list(range(world))
    part = torch.empty(2)
    comm.reduce_scatter(part, torch.arange(2.0 * world))
    assert part.tolist() == [world * 2.0 * rank, world * (2.0 * rank + 1)]
    comm.broadcast(own, world - 1)
    assert own.tolist() == [world - 1.0] * 5
    large = torch.ones(1 << 18)
    comm.all_reduce(large, async_op=True).wait()
    assert large.eq(world).all()
    if world > 1:
        sent = comm.send(torch.tensor([rank]), (rank + 1) % world, async_op=True)
        came = torch.empty(1, dtype=torch.long)
        comm.recv(came, (rank - 1) % world)
        sent.wait()
        assert came.item() == (rank - 1) % world
    half = comm.split(rank % 2)
    alone = torch.ones(3)
    half.all_reduce(alone)
    assert alone[0] == len(range(rank % 2, world, 2))
    half.close()


def outcomes_of(body, world, faults="", transport="shm", timeout=PATIENCE, args=()):
    return run_processes(
        body,
        world,
        args,
        timeout=timeout,
        options={"transport": transport},
        environment={"DPCORE_FAULT": faults} if faults else None,
        deadline=60.0,
        grace=50.0,
    )


def survivors_of(outcomes, dead):
    for outcome in outcomes:
        if outcome.rank in dead:
            assert outcome.exit_code == -signal.SIGKILL, outcome
        else:
            assert outcome.error is None and outcome.exit_code == 0, outcome
    return [outcome.result for outcome in outcomes if outcome.rank not in dead]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("world", "dead"), [(2, (0,)), (2, (1,)), (4, (2,)), (4, (0, 3)), (3, (0, 1))], ids=str
)
def test_the_others_go_on_when_ranks_die_at_once(world, dead, transport):
    faults = ",".join(f"kill:rank{rank}:op{FATAL}:middle" for rank in dead)
    reports = survivors_of(outcomes_of(reduce_all_steps, world, faults, transport), dead)
    rest = tuple(rank for rank in range(world) if rank not in dead)
    for report in reports:
        assert [members for members, _ in report][-1] == rest
        assert report[0][1] in (FATAL, FATAL + 1)  # operations that all of them had completed


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_they_go_on_again_and_again_down_to_one(transport):
    """The second and third death strike new communicators, whose numbers begin anew."""
    faults = f"kill:rank1:op{FATAL}:middle,kill:rank2:op4:shrink,kill:rank3:op6:shrink"
    (report,) = survivors_of(outcomes_of(reduce_all_steps, 4, faults, transport), (1, 2, 3))
    assert report[-1][0] == (0,)


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("step", range(7))
@pytest.mark.parametrize("victim", (0, 1))  # 0 proposes
def test_a_rank_dies_while_they_agree(victim, step, transport):
    faults = f"kill:rank3:op{FATAL}:middle,kill:rank{victim}:op{step}:shrink"
    dead = (3,) if victim == 1 and step == 2 else (victim, 3)  # only rank 0 proposes
    reports = survivors_of(outcomes_of(reduce_all_steps, 4, faults, transport), dead)
    for report in reports:
        assert report[-1][0] == tuple(sorted({0, 1, 2, 3} - set(dead)))


def go_on_in_groups(comm):
    """Rank 3 dies: of the two groups its own fails, and then what both were split from."""
    own, tensor = comm.rank, torch.ones(100)
    pair = comm.split(own % 2)
    pair.all_reduce(tensor)
    if own == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    seen = []
    for group in (pair, comm):
        try:
            group.all_reduce(tensor.fill_(1))
        except dp.PeerLost:
            group = group.shrink(PATIENCE)
            group.all_reduce(tensor.fill_(1))
        seen.append((group.survivors, tensor[0].item()))
    again = dp.current().split(0)
    again.all_reduce(tensor.fill_(1))
    return [*seen, tensor[0].item()]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_groups_go_on_each_by_itself(transport):
    reports = survivors_of(outcomes_of(go_on_in_groups, 4, transport=transport), (3,))
    whole = ((0, 1, 2), 3.0)
    assert reports == [[((), 2.0), whole, 3.0], [((0,), 1.0), whole, 3.0], [((), 2.0), whole, 3.0]]


def die_one_by_one(comm):
    """The last rank dies, over and over. Returns what each death has left: descriptors, KiB."""
    left = []
    while comm.world_size > 2:
        if comm.rank == comm.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(dp.PeerLost):
            comm.all_reduce(comm.empty(1 << 16).fill_(1))
        comm = comm.shrink(PATIENCE)
        tensor = comm.empty(1 << 16).fill_(1)
        comm.all_reduce(tensor)
        assert tensor.eq(comm.world_size).all()
        del tensor
        status = Path("/proc/self/status").read_text().split()
        resident = int(status[status.index("VmRSS:") + 1])
        left.append((len(os.listdir("/proc/self/fd")), resident))
    return left


@pytest.mark.patient
def test_what_they_hold_does_not_grow_with_deaths():
    deaths = 20
    outcomes = outcomes_of(die_one_by_one, deaths + 2)
    for left in survivors_of(outcomes, range(2, deaths + 2)):
        descriptors, resident = zip(*left, strict=True)
        assert len(left) == deaths
        assert descriptors[-1] <= descriptors[0], descriptors
        assert resident[-1] <= resident[4] + 4096, resident


def stay_behind(comm, folder):
    """Rank 1 is stopped in an operation, and wakes when the others have gone on."""
    (Path(folder) / str(comm.rank)).write_text(str(os.getpid()))
    tensor = torch.ones(10)
    try:
        for _ in range(5):
            comm.all_reduce(tensor)
    except dp.Error as error:
        first = type(error).__name__
    try:
        comm = comm.shrink(1.0)
    except dp.PeerLost as error:
        return first, str(error)
    comm.all_reduce(tensor)
    if comm.rank == 0:
        os.kill(int((Path(folder) / "1").read_text()), signal.SIGCONT)
    comm.barrier()
    return first, comm.survivors


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_was_stopped_is_told_that_it_is_out(transport, tmp_path):
    outcomes = outcomes_of(
        stay_behind, 3, "stop:rank1:op3:middle", transport, timeout=1.0, args=(str(tmp_path),)
    )
    assert [outcome.error for outcome in outcomes] == [None] * 3
    first, behind, last = (outcome.result for outcome in outcomes)
    assert first == last == ("Timeout", (0, 2))
    assert "rank 1: the other ranks went on without this one" in behind[1]


def ask_in_vain(comm):
    said = []
    try:
        comm.shrink()
    except dp.Unsupported as error:
        said.append(str(error))
    comm.barrier()
    comm.close()
    try:
        comm.shrink()
    except dp.Error as error:
        said.append(str(error))
    return said


@pytest.mark.parametrize("mode", MODES)
def test_without_a_failure_there_is_nothing_to_shrink(mode):
    options = {"threads": "inproc", "processes": "shm", "tcp": "tcp"}[mode]
    if mode == "threads":
        reports = dp.spawn(ask_in_vain, 2, mode="threads")
    else:
        reports = [outcome.result for outcome in outcomes_of(ask_in_vain, 2, "", options)]
    for rank, (healthy, closed) in enumerate(reports):
        assert f"rank {rank}: nothing has failed in this communicator of 2 ranks" in healthy
        assert f"rank {rank}: this communicator was finalized" in closed
