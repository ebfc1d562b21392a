"""Right in another way than the solution: a check has to accept these.

``== exercise | name`` begins one, and what follows is the whole file.
"""

import re


def read():
    """(exercise, name, text) of each."""
    for part in re.split(r"^== ", TEXT, flags=re.MULTILINE)[1:]:
        head, _, text = part.partition("\n")
        exercise, name = (word.strip() for word in head.split("|"))
        yield exercise, name, text


TEXT = """
== all_reduce | everybody to everybody
import torch


def all_reduce(comm, vector):
    others = [rank for rank in range(comm.world_size) if rank != comm.rank]
    parts = [vector.clone() for _ in range(comm.world_size)]
    works = [comm.send(parts[comm.rank], rank, async_op=True) for rank in others]
    for rank in others:
        comm.recv(parts[rank], src=rank)
    for work in works:
        work.wait()
    vector.copy_(torch.stack(parts).sum(0))

== all_reduce | a chain
import torch


def all_reduce(comm, vector):
    last = comm.world_size - 1
    if comm.rank > 0:
        part = torch.empty_like(vector)
        comm.recv(part, comm.rank - 1)
        vector.add_(part)
    if comm.rank < last:
        comm.send(vector, comm.rank + 1)
        comm.recv(vector, comm.rank + 1)
    if comm.rank > 0:
        comm.send(vector, comm.rank - 1)

== naive_ddp | a sum that is divided
class NaiveDDP:
    def __init__(self, module, comm):
        self.module, self.comm = module, comm
        for tensor in module.state_dict().values():
            comm.broadcast(tensor, 0)

    def __call__(self, *inputs):
        return self.module(*inputs)

    def finish(self):
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                self.comm.all_reduce(parameter.grad)
                parameter.grad /= self.comm.world_size

== flat_ddp | gradients that are views
import torch


class FlatDDP:
    def __init__(self, module, comm):
        self.module, self.comm = module, comm
        for tensor in module.state_dict().values():
            comm.broadcast(tensor, 0)

    def __call__(self, *inputs):
        return self.module(*inputs)

    def finish(self):
        trained = [p for p in self.module.parameters() if p.grad is not None]
        flat = torch.cat([p.grad.flatten() for p in trained])
        self.comm.all_reduce(flat, "mean")
        place = 0
        for parameter in trained:
            parameter.grad = flat[place : place + parameter.numel()].view_as(parameter)
            place += parameter.numel()

== per_parameter_ddp | sums, with a priority
class PerParameterDDP:
    def __init__(self, module, comm):
        self.module, self.comm, self.works = module, comm, []
        for tensor in module.state_dict().values():
            comm.broadcast(tensor, 0)
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.ready)

    def __call__(self, *inputs):
        return self.module(*inputs)

    def ready(self, parameter):
        work = self.comm.all_reduce(parameter.grad, "sum", async_op=True, priority=1)
        self.works.append((parameter, work))

    def finish(self):
        for parameter, work in self.works:
            work.wait()
            parameter.grad /= self.comm.world_size
        self.works = []

== bucketed_ddp | buckets that are kept, and counters
import torch


class BucketedDDP:
    def __init__(self, module, comm, bucket_cap_mb=1.0):
        self.module, self.comm = module, comm
        for tensor in module.state_dict().values():
            comm.broadcast(tensor, 0)
        trained = [p for p in module.parameters() if p.requires_grad][::-1]
        self.buckets, size = [[]], 0
        for parameter in trained:
            if size >= bucket_cap_mb * 2**20:
                self.buckets.append([])
                size = 0
            self.buckets[-1].append(parameter)
            size += parameter.numel() * parameter.element_size()
            parameter.register_post_accumulate_grad_hook(self.ready)
        self.number = {p: n for n, bucket in enumerate(self.buckets) for p in bucket}
        self.begin()

    def begin(self):
        self.left = [len(bucket) for bucket in self.buckets]
        self.works = []

    def __call__(self, *inputs):
        return self.module(*inputs)

    def ready(self, parameter):
        self.left[self.number[parameter]] -= 1
        while len(self.works) < len(self.buckets) and not self.left[len(self.works)]:
            bucket = self.buckets[len(self.works)]
            flat = torch.cat([member.grad.flatten() for member in bucket])
            self.works.append((self.comm.all_reduce(flat, "mean", async_op=True), bucket, flat))

    def finish(self):
        for work, bucket, flat in self.works:
            work.wait()
            for member, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                member.grad = part.view_as(member).clone()
        self.begin()

== launch_schedule | by partners
import dpcore


class Pairs(dpcore.LaunchSchedule):
    def bucket_ready(self, control, bucket):
        partner = bucket ^ 1
        if partner >= control.buckets:
            control.launch(bucket)
        elif control.is_complete(partner):
            control.launch(sorted([bucket, partner]))

    def backward_end(self, control):
        for bucket in range(control.buckets):
            control.wait(bucket)

== local_sgd | one flat average, and rounds
from itertools import islice

import torch


def train(comm, module, batches, lr, sync_every):
    for tensor in module.state_dict().values():
        comm.broadcast(tensor, 0)
    trained = [p for p in module.parameters() if p.requires_grad]
    batches = iter(batches)
    while share := list(islice(batches, 1)):
        for x, y in (batch for part in (share, islice(batches, sync_every - 1)) for batch in part):
            loss = torch.nn.functional.mse_loss(module(x), y)
            grads = torch.autograd.grad(loss, trained)
            with torch.no_grad():
                for parameter, grad in zip(trained, grads, strict=True):
                    parameter -= lr * grad
        flat = torch.cat([p.detach().flatten() for p in trained])
        comm.all_reduce(flat, "mean")
        torch.nn.utils.vector_to_parameters(flat, trained)

== local_sgd | looks one batch ahead
import torch


def train(comm, module, batches, lr, sync_every):
    for tensor in module.state_dict().values():
        comm.broadcast(tensor, 0)
    trained = [p for p in module.parameters() if p.requires_grad]
    coming = iter(batches)
    batch, step = next(coming, None), 0
    while batch is not None:
        step += 1
        loss = torch.nn.functional.mse_loss(module(batch[0]), batch[1])
        grads = torch.autograd.grad(loss, trained)
        with torch.no_grad():
            for parameter, grad in zip(trained, grads, strict=True):
                parameter -= lr * grad
        batch = next(coming, None)
        if step % sync_every == 0 or batch is None:
            for parameter in trained:
                comm.all_reduce(parameter.data, "mean")

== ring_attention | a join in place
import torch


def block(q, k, v):
    scores = q @ k.T / q.shape[1] ** 0.5
    lse = scores.logsumexp(1)
    return (scores - lse[:, None]).exp() @ v, lse


def join(out, lse, more, its_lse):
    share = torch.sigmoid(its_lse - lse)
    out += share[:, None] * (more - out)
    lse.copy_(torch.logaddexp(lse, its_lse))
    return out, lse


def ring_attention(comm, q, k, v):
    right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    out, lse = block(q, k, v)
    for _ in range(comm.world_size - 1):
        came = torch.empty_like(k), torch.empty_like(v)
        works = [comm.send(tensor, right, async_op=True) for tensor in (k, v)]
        for tensor in came:
            comm.recv(tensor, left)
        for work in works:
            work.wait()
        k, v = came
        out, lse = join(out, lse, *block(q, k, v))
    return out

== refactoring | losses that are added in double precision
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Subset

import dpcore

BATCH, SEED = 32, 1


def make_model():
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))


def add_noise(x, generator):
    return x + 0.1 * torch.randn(x.shape, generator=generator)


def loss_of(model, x, y):
    return nn.functional.cross_entropy(model(x), y)


def save(model, path):
    torch.save(model.state_dict(), path)


def load(model, path):
    model.load_state_dict(torch.load(path))


def train(comm, train_set, test_set, path, epochs):
    rank, world = comm.rank, comm.world_size
    torch.manual_seed(SEED)
    model = make_model()
    wrapped, noise = dpcore.DataParallel(model), torch.Generator().manual_seed(SEED + rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    sampler = DistributedSampler(train_set, world, rank, shuffle=True, seed=SEED)
    batches = DataLoader(train_set, BATCH // world, sampler=sampler)
    tests = DataLoader(Subset(test_set, range(rank, len(test_set), world)), BATCH)
    losses, accuracies = [], []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        sums = torch.zeros(2, dtype=torch.float64)
        for x, y in batches:
            optimizer.zero_grad()
            loss = loss_of(wrapped, add_noise(x, noise), y)
            loss.backward()
            optimizer.step()
            sums[0] += loss.item()
        with torch.no_grad():
            for x, y in tests:
                sums[1] += (model(x).argmax(1) == y).sum()
        comm.all_reduce(sums, "sum")
        losses.append(sums[0].item() / len(batches) / world)
        accuracies.append(sums[1].item() / len(test_set))
        if rank == 0:
            print(epoch, losses[-1], accuracies[-1])
            if accuracies[-1] == max(accuracies):
                save(model, path)
    comm.barrier()
    load(model, path)
    return model, losses, accuracies

== who_is_alive | what each rank knew at first, and as many rounds as ranks
class Agreement:
    def __init__(self, rank, world_size, dead):
        self.world_size, self.left = world_size, world_size
        self.known = {rank: sorted(dead)}

    def message(self):
        return {"known": self.known}

    def hear(self, messages):
        for message in messages.values():
            self.known.update(message["known"])
        self.left -= 1
        if self.left == 0:
            dead = {one for known in self.known.values() for one in known}
            return [rank for rank in range(self.world_size) if rank not in dead]


def may_go_on(world_size, dead, here):
    silent = set(range(world_size)) - dead - here
    if len(silent) == len(here):
        return min(here) < min(silent)
    return len(silent) < len(here)
"""
