"""Ranks die, and the loop of the others goes on: to the bits of a run without processes.

Where a rank dies after its last all-reduce of a step, the others may or may not have heard of all
of it: then either all take the step or none does, and what they took decides what is right.
"""

import sys

import cloudpickle
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import dpcore as dp
from dpcore.comm.launch.spawn import run_processes
from tests.faults import elastic_training
from tests.faults.elastic_training import EPOCHS, PLACES, check, die, train

for module in (sys.modules[__name__], elastic_training):
    cloudpickle.register_pickle_by_value(module)

LAST = 5  # of the first epoch, with four ranks


def survivors(world, dead, places, *, faults="", transport="shm", **options):
    """The reports of the ranks that live, by number."""

    def body(comm):
        return train(comm, places, **options)

    outcomes = run_processes(
        body,
        world,
        timeout=20.0,
        options={"transport": transport},
        environment={"DPCORE_FAULT": faults} if faults else None,
        deadline=60.0,
        grace=50.0,
    )
    for outcome in outcomes:
        assert outcome.exit_code == (-9 if outcome.rank in dead else 0), outcome
    return {one.rank: one.result for one in outcomes if one.rank not in dead}


def test_without_a_death_it_is_the_plain_loop():
    plain = dp.spawn(plain_training, 3)
    reports = survivors(3, (), {})
    check(reports, 3)
    assert {found for _, _, found in reports.values()} == set(plain)


def plain_training(comm):
    module, optimizer, scheduler = elastic_training.parts()
    samples = elastic_training.data()
    sampler = DistributedSampler(samples, comm.world_size, comm.rank, seed=1)
    loader = DataLoader(samples, elastic_training.BATCH, sampler=sampler)
    model = dp.DataParallel(module, deterministic=True, bucket_cap_mb=0.0005)
    torch.manual_seed(100 + comm.rank)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y, _ in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            scheduler.step()
    return elastic_training.digest(module, optimizer)


@pytest.mark.parametrize("step", (0, 3, LAST))
@pytest.mark.parametrize("place", PLACES)
def test_a_rank_dies(place, step):
    victim = PLACES.index(place) % 4
    reports = survivors(4, (victim,), {(step, place): (victim,)})
    ranks = check(reports, 4)
    rest = tuple(rank for rank in range(4) if rank != victim)
    assert set(ranks[:step]) | set(ranks[step + 1 :]) == ({(0, 1, 2, 3), rest} if step else {rest})
    if place in ("start", "forward", "in backward"):
        assert ranks[step] == rest  # they have repeated it without the victim
    if place == "step" and step < LAST:
        assert ranks[step] in ((0, 1, 2, 3), rest)


@pytest.mark.parametrize("transport", ("shm", "tcp"))
@pytest.mark.parametrize("operation", (26, 33))  # later communicators make fewer
def test_a_rank_dies_in_the_middle_of_an_operation(operation, transport):
    faults = f"kill:rank1:op{operation}:middle"
    check(survivors(3, (1,), {}, faults=faults, transport=transport), 3)


def test_two_die_at_once_and_another_one_later():
    """The samples are dealt out three times, and rank 3 trains alone in the end."""
    places = {(2, "start"): (0, 2), (8, "forward"): (1,)}
    ranks = check(survivors(4, (0, 1, 2), places), 4)
    assert ranks[1:3] == [(0, 1, 2, 3), (1, 3)] and ranks[7:9] == [(1, 3), (3,)]


@pytest.mark.parametrize("step", (1, 3, 5))
def test_a_rank_dies_while_they_agree(step):
    faults = f"kill:rank2:op{step}:shrink"
    ranks = check(survivors(4, (1, 2), {(4, "in backward"): (1,)}, faults=faults), 4)
    assert ranks[4] == (0, 3)


def behind(run, own):
    """Ranks 2 and 3 hear of the death of rank 1 before they have heard all of step 4."""
    if own in (2, 3):
        step = run._step_optimizer

        def late():
            if run.step == 4 and len(run.ranks) == 4:
                try:
                    run.comm.recv(torch.empty(1), 1)
                except dp.PeerLost as problem:
                    run._problem = problem
            step()

        run._step_optimizer = late


def test_some_have_finished_the_step_and_give_it_to_the_others():
    ranks = check(survivors(4, (1,), {(5, "start"): (1,)}, before=behind), 4)
    assert ranks[4] == (0, 1, 2, 3) and ranks[5] == (0, 2, 3)


def giver_dies(run, own):
    behind(run, own)
    if own == 0:  # when the size is sent, and the state is not
        run._give = lambda takers: [run.comm.send(torch.tensor([8]), takers[0]), die()]


def test_the_only_rank_that_has_finished_the_step_dies_while_it_gives():
    ranks = check(survivors(4, (0, 1), {(5, "start"): (1,)}, before=giver_dies), 4)
    assert ranks[4] == (2, 3)  # no rank that lives has finished it


def test_samples_come_from_workers_and_ranks_die():
    check(survivors(2, (1,), {(3, "forward"): (1,)}, workers=1), 2)


# ---- what it refuses -------------------------------------------------------------------------


def refusals(comm):
    samples = TensorDataset(torch.ones(8, 2))
    sampler = DistributedSampler(samples, comm.world_size, comm.rank)
    loader = DataLoader(samples, 2, sampler=sampler)

    def said(module=None, steps=1, scheduler=False, sampler=sampler, **options):
        module = module or nn.Linear(2, 2)
        model = dp.DataParallel(module, **options)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        if scheduler:
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        with (
            pytest.raises(dp.Unsupported) as problem,
            dp.elastic(model, optimizer, sampler) as run,
        ):
            for (x,) in run.batches(loader):
                model(x).sum().backward()
                for _ in range(steps):
                    optimizer.step()
        return str(problem.value)

    found = [
        said(schedule="dear"),
        said(nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))),
        said(steps=0),
        said(steps=2),
        said(scheduler=True),
        said(sampler=torch.utils.data.SequentialSampler(samples)),
    ]
    comm.barrier()
    return found


def test_what_it_cannot_do_it_says():
    (words,) = [one.result for one in run_processes(refusals, 1, timeout=20.0)]
    for said, wanted in zip(
        words,
        ("schedule 'dear'", "SyncBatchNorm", "without optimizer.step()", "this is a second",
         "a learning rate scheduler", "DistributedSampler"),
        strict=True,
    ):  # fmt: skip
        assert wanted in said


def steps_of_scaled_training(comm):
    """What is finished after a batch whose loss overflows on one rank."""
    data = TensorDataset(torch.ones(12, 2))
    sampler = DistributedSampler(data, comm.world_size, comm.rank)
    model = dp.DataParallel(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with dp.elastic(model, optimizer, sampler, scaler) as run:
        for number, (x,) in enumerate(run.batches(DataLoader(data, 2, sampler=sampler))):
            optimizer.zero_grad()
            loss = model(x).square().mean() * (torch.inf if number == comm.rank == 1 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    return run.step, scaler.get_scale(), [p.isfinite().all().item() for p in model.parameters()]


def test_a_scaler_may_leave_out_a_step():
    outcomes = run_processes(steps_of_scaled_training, 2, timeout=20.0)
    assert [one.result for one in outcomes] == [(3, 2.0**9, [True, True])] * 2
