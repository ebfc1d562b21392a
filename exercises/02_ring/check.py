"""Checks of the exercise beside this file."""

import torch

from dpcore.exercise.judging import need, need_same, need_values, need_written

ALLOWED = ("send", "recv")
LENGTH = 1000  # no multiple of 3
LONG = 1 << 20


def vector(rank, length):
    return torch.randn(length, generator=torch.Generator().manual_seed(rank))


def adds(on, student, length):
    mine = vector(on.rank, length)
    with on.watch() as seen:
        student.ring_all_reduce(on.comm, mine)
    return {"result": mine, "sent": seen.sent(), "calls": [list(call) for call in on.calls]}


def expected(world, length):
    return sum(vector(rank, length).double() for rank in range(world)).float().numpy()


def need_sums(lab, world, length):
    for rank, found in enumerate(lab.ranks("adds", world, length)):
        what = f"rank {rank} of {world}"
        need_written(found["result"], vector(rank, length).numpy(), world, what)
        need_values(found["result"], expected(world, length), what)


def check_sums(lab):
    """Three ranks hold the sum, in the vector that was handed over."""
    need_sums(lab, 3, LENGTH)


def check_four(lab):
    """Four ranks hold the sum as well, and so do two."""
    need_sums(lab, 4, LENGTH)
    need_sums(lab, 2, LENGTH)


def check_short(lab):
    """A vector of two elements, with four ranks, is right as well."""
    need_sums(lab, 4, 2)


def check_long(lab):
    """Vectors of 4 MiB arrive as well."""
    need_sums(lab, 3, LONG)


def check_neighbours(lab):
    """Each rank sends to its right neighbour and receives from its left one only."""
    for rank, found in enumerate(lab.ranks("adds", 4, LENGTH)):
        for name, peer in found["calls"]:
            right = (rank + (1 if name == "send" else -1)) % 4
            need(peer == right, f"rank {rank} calls {name} with rank {peer}, and not {right}")
        operations = len(found["sent"])
        need(
            operations == len(found["calls"]),
            f"rank {rank}: the core has run {operations} operations, and {len(found['calls'])} "
            "went through comm",
        )


def check_steps(lab):
    """There are 2 (world - 1) steps: six messages with four ranks."""
    for rank, found in enumerate(lab.ranks("adds", 4, LENGTH)):
        count = sum(name == "send" for name, _ in found["sent"])
        need(count == 6, f"rank {rank} sends {count} messages, and 6 are right")


def check_bytes(lab):
    """A rank sends 2 (world - 1) / world of the vector's bytes, and no more."""
    most = 2 * 3 * (LENGTH // 4) * 4
    for rank, found in enumerate(lab.ranks("adds", 4, LENGTH)):
        sent = sum(nbytes for name, nbytes in found["sent"] if name == "send")
        need(sent == most, f"rank {rank} sends {sent} bytes, and {most} are enough and needed")


def check_bits(lab):
    """All ranks hold the same bits."""
    ranks = lab.ranks("adds", 3, LENGTH)
    for rank, found in enumerate(ranks[1:], 1):
        need_same(found["result"], ranks[0]["result"], f"rank {rank} beside rank 0")
