"""A training whose ranks die at named places, and what its survivors have to arrive at.

``train`` runs on the ranks. ``alone`` computes the same in one process from nothing but the ranks
that took part in each step: it deals out the samples, runs every rank's forward and backward with
its own random numbers and running statistics, and adds in the order of the ranks.
"""

import copy
import hashlib
import os
import signal

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import dpcore as dp
from dpcore.ddp.elastic.start import seed_from

SAMPLES, BATCH, EPOCHS = 44, 2, 2
PLACES = ("start", "forward", "in backward", "backward", "in step", "step")


def data():
    x = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(3))
    return TensorDataset(x, x.sin().sum(1, keepdim=True), torch.arange(SAMPLES))


class Centre(nn.Module):
    """Running statistics as in batch normalisation, also of a batch of one."""

    def __init__(self, width):
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x):
        self.mean.lerp_(x.detach().mean(0), 0.2)
        return x - self.mean.clone()


def parts():
    """With random numbers, running statistics, state of an optimizer and of a schedule."""
    torch.manual_seed(5)
    module = nn.Sequential(
        nn.Linear(6, 40), Centre(40), nn.Dropout(0.3), nn.Tanh(), nn.Linear(40, 1)
    )
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.02)
    return module, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def digest(module, optimizer):
    """Of what all ranks must have alike, to the bit."""
    tensors = [*module.parameters()]
    for group in optimizer.state_dict()["state"].values():
        tensors += [group[name] for name in sorted(group)]
    raw = b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(raw).hexdigest()


def train(comm, places, before=None, workers=0, door=None, late=None, cap=0.0005):
    """``places``: by step and place, the ranks that die there. ``before(run, own)`` may prepare
    more. ``late``: the number of a rank that joins. ``cap``: of buckets, in MiB. Returns the ranks
    and samples of each step, as this rank took it last, and the digest."""
    own, taken = comm.rank if late is None else late, {}
    module, optimizer, scheduler = parts()
    samples = data()
    sampler = DistributedSampler(samples, comm.world_size, comm.rank, seed=1)
    loader = DataLoader(samples, BATCH, sampler=sampler, num_workers=workers)
    model = dp.DataParallel(module, deterministic=True, bucket_cap_mb=cap)
    torch.manual_seed(100 + own)

    def reach(place):
        if own in places.get((run.step, place), ()):
            die()

    with dp.elastic(model, optimizer, sampler, scheduler, door=door) as run:
        if before is not None:
            before(run, own)
        module[4].weight.register_hook(lambda _: reach("in backward"))
        optimizer.register_step_pre_hook(lambda *_: reach("in step"))
        for epoch in range(EPOCHS):
            sampler.set_epoch(epoch)
            for x, y, numbers in run.batches(loader):
                taken[run.step] = (run.ranks, numbers.tolist())
                reach("start")
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(x), y)
                reach("forward")
                loss.backward()
                reach("backward")
                optimizer.step()
                scheduler.step()
                reach("step")
    return taken, run.step, digest(module, optimizer)


def alone(ranks_of_step, world):
    """What every rank that lives must have taken and arrived at."""
    module, optimizer, scheduler = parts()
    samples = data()
    buffers = [copy.deepcopy(dict(module.named_buffers())) for _ in range(world)]
    randoms = [torch.manual_seed(100 + rank).get_state() for rank in range(world)]
    step, taken = 0, {}

    def take_in(ranks):
        for joiner in range(len(buffers), max(ranks) + 1):  # the lowest rank gave it the state
            buffers.append(copy.deepcopy(buffers[ranks[0]]))
            seed_from(randoms[ranks[0]], joiner)
            randoms.append(torch.get_rng_state())

    for epoch in range(EPOCHS):
        take_in(ranks_of_step[step])
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(1 + epoch)).tolist()
        for rank in range(len(randoms)):  # a loader seeds its workers
            torch.set_rng_state(randoms[rank])
            torch.empty((), dtype=torch.int64).random_()
            randoms[rank] = torch.get_rng_state()
        used = 0
        while used < SAMPLES:
            ranks = ranks_of_step[step]
            take_in(ranks)
            mine = order[used : used + BATCH * len(ranks)]
            mine += order[: -len(mine) % len(ranks)]
            gradients = []
            first = copy.deepcopy(buffers[ranks[0]])
            for place, rank in enumerate(ranks):
                numbers = mine[place :: len(ranks)]
                taken.setdefault(step, {})[rank] = numbers
                x, y, _ = samples[numbers]
                for name, buffer in module.named_buffers():
                    buffer.copy_(first[name])
                torch.set_rng_state(randoms[rank])
                module.zero_grad()
                nn.functional.mse_loss(module(x), y).backward()
                gradients.append([p.grad for p in module.parameters()])
                randoms[rank] = torch.get_rng_state()
                buffers[rank] = copy.deepcopy(dict(module.named_buffers()))
            for parameter, *each in zip(module.parameters(), *gradients, strict=True):
                total = each[0].clone()
                for gradient in each[1:]:
                    total += gradient
                parameter.grad = total * (1 / len(ranks))
            optimizer.step()
            scheduler.step()
            used += BATCH * len(ranks)
            step += 1
    return taken, step, digest(module, optimizer)


def check(reports, world):
    """Of the ranks that live, by their first numbers. Returns the ranks that took each step."""
    first = min(reports)
    ranks = {step: ranks for step, (ranks, _) in reports[first][0].items()}
    assert min(ranks) == 0, "a rank that was there from the start"
    taken, steps, wanted = alone(ranks, world)
    for rank, (own, last, found) in reports.items():
        assert last == steps, (rank, last, steps)
        since = min(own, default=steps)  # it may have joined
        assert {step: ranks for step, (ranks, _) in own.items()} == {
            step: of_step for step, of_step in ranks.items() if step >= since
        }, rank
        assert {step: numbers for step, (_, numbers) in own.items()} == {
            step: of_ranks[rank] for step, of_ranks in taken.items() if step >= since
        }, rank
        assert found == wanted, rank
    return [ranks[step] for step in range(steps)]
