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
"""
