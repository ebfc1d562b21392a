"""Ranks that raise an Error of dpcore which no other rank knows of. Run by test_own_errors.py.

    own_errors.py CASE RANK WORLD TRANSPORT FOLDER

Rank 1 makes the mistake and ends by it; the others need it for what they do next.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import dpcore

CASE, RANK, WORLD, TRANSPORT, FOLDER = sys.argv[1], *map(int, sys.argv[2:4]), *sys.argv[4:]
IS_WRONG = RANK == 1


def start():
    return dpcore.init(
        rank=RANK,
        world_size=WORLD,
        init_method=f"file://{FOLDER}/rendezvous",
        transport=TRANSPORT,
        timeout=60,
    )


def module():
    made = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    made[1].requires_grad_(False)
    return made


def train(model, steps=4):
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()


def reduce(comm):
    comm.all_reduce(torch.ones(4), op="foo" if IS_WRONG else "sum")


def unknown_operator():
    reduce(start())


def replaced_parameter(process_group=None):
    model = dpcore.DataParallel(module(), process_group=process_group)
    train(model)
    if IS_WRONG:
        model.module[2].weight = nn.Parameter(torch.ones(1, 4))
    train(model)


def unfrozen_parameter():
    start()
    model = dpcore.DataParallel(module())
    train(model)
    if IS_WRONG:
        model.module[1].requires_grad_(True)
    train(model)


def in_backward():
    comm = start()
    x = torch.ones(4, requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: reduce(comm))
    y.sum().backward()


def in_a_communication_hook():
    comm = start()
    model = dpcore.DataParallel(module())

    def hook(state, bucket):
        reduce(comm)
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, hook)
    train(model)


def in_a_split_group():
    comm = start()
    model = dpcore.DataParallel(module(), comm=comm.split(0))
    train(model)
    if IS_WRONG:
        model.module[1].requires_grad_(True)
    train(model)


def in_a_group_of_torch(backend):
    dist.init_process_group(
        backend, init_method=f"file://{FOLDER}/store", rank=RANK, world_size=WORLD
    )
    replaced_parameter()


def then_finalized():
    """The program tidies up, and the exception goes on its way."""
    try:
        reduce(start())
    finally:
        dpcore.finalize()


def then_destroyed():
    try:
        in_a_group_of_torch("dpcore")
    finally:
        dist.destroy_process_group()


CASES = {
    "unknown operator": unknown_operator,
    "replaced": lambda: (start(), replaced_parameter()),
    "unfrozen": unfrozen_parameter,
    "in backward": in_backward,
    "in a hook": in_a_communication_hook,
    "in a split group": in_a_split_group,
    "in a group of gloo": lambda: in_a_group_of_torch("gloo"),
    "in a group of dpcore": lambda: in_a_group_of_torch("dpcore"),
    "then finalized": then_finalized,
    "then destroyed": then_destroyed,
}

if __name__ == "__main__":
    assert Path(FOLDER).is_dir()
    CASES[CASE]()
