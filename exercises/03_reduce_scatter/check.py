"""Checks of the exercise beside this file."""

import torch

from dpcore.school.exercise.explaining import Origin, sums_in_other_ways
from dpcore.school.exercise.judging import need, need_same, need_to_end, need_values, need_waited

ALLOWED = ("send", "recv")
LENGTH = 1008  # a multiple of 2, 3 and 4: what is wrong is not the sizes of messages


def vector(rank, length, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(length, generator=generator, dtype=torch.float64).to(dtype)


def adds(on, student, length):
    mine = vector(on.rank, length)
    with on.watch() as seen:
        result = student.reduce_scatter(on.comm, mine)
    return {
        "result": result,
        "vector": mine,
        "sent": seen.sent(),
        "calls": list(on.calls),
        "misuse": on.misuse(),
    }


def adds_twice(on, student, length):
    """Then with doubles, and parts that are not of one size."""
    student.reduce_scatter(on.comm, vector(on.rank, length))
    return {"result": student.reduce_scatter(on.comm, vector(on.rank, length + 5, torch.float64))}


def parts_of(rank, world, length, dtype=torch.float32):
    """Part number ``rank`` of every rank's vector."""
    vectors = [vector(other, length, dtype) for other in range(world)]
    return [one.tensor_split(world)[rank].numpy() for one in vectors]


def in_order(terms):
    total = terms[0] * 0
    for term in terms:
        total = total + term
    return total


def need_parts(lab, world, length, dtype=torch.float32, body="adds", more=0):
    parts = [parts_of(rank, world, length + more, dtype) for rank in range(world)]
    for rank, found in enumerate(lab.ranks(body, world, length)):
        others = {
            f"those of part {other}": in_order(terms)
            for other, terms in enumerate(parts)
            if other != rank
        }
        what = f"part of rank {rank} of {world}" + (", second call" if more else "")
        origin = Origin(parts[rank], rank, others)
        need_values(found["result"], in_order(parts[rank]), what, origin=origin)


def check_parts(lab):
    """Of three ranks, each gets its part of the sum."""
    need_parts(lab, 3, LENGTH)


def check_again(lab):
    """A second call is right as well, with doubles that can't be cut into equal parts."""
    need_parts(lab, 3, LENGTH, torch.float64, "adds_twice", 5)


def check_two(lab):
    """Two ranks get theirs as well, and so do four, and one that is alone."""
    for world in (2, 4, 1):
        need_parts(lab, world, LENGTH)


def check_short(lab):
    """A vector of two elements is right with four ranks, two of which get nothing."""
    need_parts(lab, 4, 2)


def check_order(lab):
    """The ranks are added in their order, to the last bit."""
    for rank, found in enumerate(lab.ranks("adds", 4, LENGTH)):
        terms = parts_of(rank, 4, LENGTH)
        what = f"part of rank {rank}"
        need_same(found["result"], in_order(terms), what, sums_in_other_ways(terms, rank))


def check_untouched(lab):
    """The vector that was handed over stays as it is."""
    for rank, found in enumerate(lab.ranks("adds", 3, LENGTH)):
        need_values(found["vector"], vector(rank, LENGTH).numpy(), f"the vector of rank {rank}")


def check_waits(lab):
    """Every send is waited for."""
    for world in (3, 4):
        need_waited([found["misuse"] for found in lab.ranks("adds", world, LENGTH)])


def check_stands(lab):
    """It ends as well where a send waits for its receiver."""
    for world in (3, 4):
        need_to_end([found["calls"] for found in lab.ranks("adds", world, LENGTH)])


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
