"""Checks of the exercise beside this file."""

import torch

from dpcore.exercise.judging import need, need_same, need_values

ALLOWED = ("send", "recv")
LENGTH = 1000  # no multiple of 3


def vector(rank, length):
    return torch.randn(length, generator=torch.Generator().manual_seed(rank))


def adds(on, student, length):
    mine = vector(on.rank, length)
    with on.watch() as seen:
        result = student.reduce_scatter(on.comm, mine)
    return {"result": result, "vector": mine, "sent": seen.sent()}


def expected(rank, world, length):
    total = torch.zeros(length)
    for other in range(world):
        total += vector(other, length)
    return total.tensor_split(world)[rank].numpy()


def need_parts(lab, world, length):
    for rank, found in enumerate(lab.ranks("adds", world, length)):
        what = f"part of rank {rank} of {world}"
        need_values(found["result"], expected(rank, world, length), what)


def check_parts(lab):
    """Of three ranks, each gets its part of the sum."""
    need_parts(lab, 3, LENGTH)


def check_two(lab):
    """Two ranks get theirs as well, and so does one that is alone."""
    need_parts(lab, 2, LENGTH)
    need_parts(lab, 1, LENGTH)


def check_short(lab):
    """A vector of two elements is right with four ranks, two of which get nothing."""
    need_parts(lab, 4, 2)


def check_order(lab):
    """The ranks are added in their order, to the last bit."""
    for rank, found in enumerate(lab.ranks("adds", 4, LENGTH)):
        what = f"part of rank {rank}"
        need_same(found["result"], expected(rank, 4, LENGTH), what)


def check_untouched(lab):
    """The vector that was handed over stays as it is."""
    for rank, found in enumerate(lab.ranks("adds", 3, LENGTH)):
        need_values(found["vector"], vector(rank, LENGTH).numpy(), f"the vector of rank {rank}")


def check_bytes(lab):
    """A rank sends (world - 1) / world of the vector's bytes: each part to its owner, once."""
    most = 3 * (LENGTH // 4) * 4
    for rank, found in enumerate(lab.ranks("adds", 4, LENGTH)):
        sent = sum(nbytes for name, nbytes in found["sent"] if name == "send")
        need(sent == most, f"rank {rank} sends {sent} bytes, and {most} are enough and needed")


def check_messages(lab):
    """It is done by messages alone, and each that is sent is received."""
    sent = [name for found in lab.ranks("adds", 4, LENGTH) for name, _ in found["sent"]]
    others = sorted({name for name in sent if name not in ALLOWED})
    need(not others, f"dpcore's core has also run {', '.join(others)}")
    gone, come = sent.count("send"), sent.count("recv")
    need(gone == come, f"{gone} messages were sent and {come} received")
