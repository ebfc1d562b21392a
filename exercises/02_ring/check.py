"""Checks of the exercise beside this file."""

import torch

from dpcore.school.exercise.explaining import Origin
from dpcore.school.exercise.judging import (
    need,
    need_same,
    need_to_end,
    need_values,
    need_waited,
    need_written,
)

ALLOWED = ("send", "recv")
LENGTH = 1008  # a multiple of 2, 3 and 4: what is wrong is not the sizes of messages
LONG = 1 << 20


def vector(rank, length, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(length, generator=generator, dtype=torch.float64).to(dtype)


def adds(on, student, length):
    mine = vector(on.rank, length)
    with on.watch() as seen:
        student.ring_all_reduce(on.comm, mine)
    return {
        "result": mine,
        "sent": seen.sent(),
        "calls": list(on.calls),
        "misuse": on.misuse(),
    }


def adds_twice(on, student, length):
    """Then with doubles, and chunks that are not of one size."""
    mine = vector(on.rank, length)
    student.ring_all_reduce(on.comm, mine)
    again = vector(on.rank, length + 5, torch.float64)
    student.ring_all_reduce(on.comm, again)
    return {"result": again}


def need_sums(lab, world, length, dtype=torch.float32, body="adds", more=0):
    terms = [vector(rank, length + more, dtype) for rank in range(world)]
    whole = sum(term.double() for term in terms).to(dtype).numpy()
    terms = [term.numpy() for term in terms]
    for rank, found in enumerate(lab.ranks(body, world, length)):
        what = f"rank {rank} of {world}" + (", second call" if more else "")
        need_written(found["result"], terms[rank], world, what)
        need_values(found["result"], whole, what, origin=Origin(terms, rank))


def check_sums(lab):
    """Three ranks hold the sum, in the vector that was handed over."""
    need_sums(lab, 3, LENGTH)


def check_again(lab):
    """A second call is right as well, with doubles that can't be cut into equal chunks."""
    need_sums(lab, 3, LENGTH, torch.float64, "adds_twice", 5)


def check_four(lab):
    """Four ranks hold the sum as well, and so do two, and one."""
    for world in (4, 2, 1):
        need_sums(lab, world, LENGTH)


def check_short(lab):
    """A vector of two elements, with four ranks, is right as well."""
    need_sums(lab, 4, 2)


def check_long(lab):
    """Vectors of 4 MiB arrive as well."""
    need_sums(lab, 3, LONG)


def check_waits(lab):
    """Every send is waited for, and what it sends is left alone until then."""
    for world in (3, 4):
        need_waited([found["misuse"] for found in lab.ranks("adds", world, LENGTH)])


def check_stands(lab):
    """It ends as well where a send waits for its receiver."""
    need_to_end([found["calls"] for found in lab.ranks("adds", 4, LENGTH)])


def check_neighbours(lab):
    """Each rank sends to its right neighbour and receives from its left one only."""
    for rank, found in enumerate(lab.ranks("adds", 4, LENGTH)):
        messages = [(name, peer) for name, peer, *_ in found["calls"] if name != "wait"]
        for name, peer in messages:
            right = (rank + (1 if name == "send" else -1)) % 4
            need(peer == right, f"rank {rank} calls {name} with rank {peer}, and not {right}")
        operations = len(found["sent"])
        need(
            operations == len(messages),
            f"rank {rank}: the core has run {operations} operations, and {len(messages)} went "
            "through comm",
        )


def check_steps(lab):
    """There are 2 (world - 1) steps, in each of which all ranks send: six with four ranks."""
    ranks = lab.ranks("adds", 4, LENGTH)
    for rank, found in enumerate(ranks):
        count = sum(name == "send" for name, _ in found["sent"])
        need(count == 6, f"rank {rank} sends {count} messages, and 6 are right")
    steps = need_to_end([found["calls"] for found in ranks]).steps
    need(
        steps == 6,
        f"{steps} messages come one after the other, and 6 are right: a rank begins to send before "
        "it receives",
    )


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
