"""Ranks die and join under ``dp.elastic``, and the weights are those of a run on one rank alone."""

import sys

import cloudpickle
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import dpcore as dp
from dpcore.comm.launch.spawn import run_processes
from tests.faults import elastic_training, test_joining
from tests.faults.elastic_training import EPOCHS, data, die, digest, parts
from tests.faults.test_joining import joined

for module in (sys.modules[__name__], elastic_training, test_joining):
    cloudpickle.register_pickle_by_value(module)

BATCH, SHARDS = 11, 8  # samples of a step, whatever the number of ranks


def train(comm, places, before=None, door=None, late=None, cap=None):
    """``places``: by step and place, the ranks that die there; see elastic_training."""
    torch.set_num_threads(1)
    own, samples = comm.rank if late is None else late, data()
    module, optimizer, scheduler = parts()
    module.append(nn.BatchNorm1d(1, momentum=0.2)).append(nn.Linear(1, 1))
    optimizer.add_param_group({"params": [*module[5].parameters(), *module[6].parameters()]})
    sampler = DistributedSampler(samples, comm.world_size, comm.rank, seed=1)
    loader = DataLoader(samples, BATCH, sampler=sampler)
    model = dp.DataParallel(module, virtual_ranks=SHARDS)
    taken = []

    def reach(place):
        if own in places.get((run.step, place), ()):
            die()

    optimizer.register_step_pre_hook(lambda *_: reach("in step"))
    with dp.elastic(model, optimizer, sampler, scheduler, door=door) as run:
        if before is not None:
            before(run, own)
        for epoch in range(EPOCHS):
            sampler.set_epoch(epoch)
            for x, y, numbers in run.batches(loader):
                taken[run.step :] = [(run.comm.world_size, numbers.tolist())]
                reach("start")
                optimizer.zero_grad()
                for inputs, targets in model.shards((x, y)):
                    reach("shard")
                    module[5].train(len(inputs) > 1)
                    nn.functional.mse_loss(model(inputs), targets).backward()
                reach("shards")
                optimizer.step()
                scheduler.step()
                reach("step")
    everything = digest(module, optimizer), [b.tolist() for b in module.buffers()]
    return taken, run.step, model.virtual.step, everything


def run_on(world, places, **options):
    def body(comm):
        return train(comm, places)

    dead = {rank for ranks in places.values() for rank in ranks}
    outcomes = run_processes(
        body, world, timeout=20.0, options=options, environment=None, deadline=60.0, grace=50.0
    )
    for outcome in outcomes:
        assert outcome.exit_code == (-9 if outcome.rank in dead else 0), outcome
    return [one.result for one in outcomes if one.rank not in dead]


def test_three_deaths_change_no_bit():
    places = {
        (1, "shard"): (2,),
        (2, "shards"): (0,),  # the others may or may not have its sums
        (5, "in step"): (3,),
    }
    (alone,) = run_on(1, {})
    (survivor,) = run_on(4, places)
    assert [world for world, _ in survivor[0]][::7] == [4, 1]
    assert [numbers for _, numbers in survivor[0]] == [numbers for _, numbers in alone[0]]
    assert survivor[1:] == alone[1:]
    assert alone[1] == alone[2] == EPOCHS * 4


def test_a_rank_that_was_left_behind_takes_over_the_buffers():
    """Others had finished the step: by its end, a rank has no shards' statistics of its own."""
    (alone,) = run_on(1, {})
    for survivor in run_on(3, {(3, "step"): (0,), (0, "start"): ()}, transport="tcp"):
        assert survivor[1:] == alone[1:]


def test_a_rank_that_joins_changes_no_bit():
    """It takes over buffers, seed and step; later a rank dies that was there before."""
    (alone,) = run_on(1, {})
    outcomes = joined(2, 1, {(6, "shard"): (0,)}, dead=(0,), trains=train)
    assert sorted(outcomes) == [1, 2]
    assert [world for world, _ in outcomes[1][0]] == [2] * 4 + [3] * 2 + [2] * 2
    for one in outcomes.values():
        assert one[1:] == alone[1:]
