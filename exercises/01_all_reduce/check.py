"""Checks of the exercise beside this file."""

import torch

from dpcore.exercise.judging import need, need_same, need_values, need_written

ALLOWED = ("send", "recv")
LONG = 1 << 20


def vector(rank, length, call):
    generator = torch.Generator().manual_seed(1000 * call + rank)
    return torch.randn(length, generator=generator)


def adds(on, student, length):
    found = {"results": []}
    with on.watch() as seen:
        for call in range(2):
            mine = vector(on.rank, length, call)
            student.all_reduce(on.comm, mine)
            found["results"].append(mine)
    found["sent"] = seen.sent()
    return found


def expected(world, length, call):
    return sum(vector(rank, length, call).double() for rank in range(world)).float().numpy()


def need_sums(lab, world, length, call=0):
    for rank, found in enumerate(lab.ranks("adds", world, length)):
        what = f"rank {rank} of {world}" + (", second call" if call else "")
        need_written(found["results"][call], vector(rank, length, call).numpy(), world, what)
        need_values(found["results"][call], expected(world, length, call), what)


def check_two_ranks(lab):
    """Two ranks both hold the sum, in the vector that was handed over."""
    need_sums(lab, 2, 10)


def check_three_ranks(lab):
    """Three ranks hold the sum as well."""
    need_sums(lab, 3, 10)


def check_again(lab):
    """A second call is right as well: nothing of the first is left over."""
    need_sums(lab, 3, 10, call=1)


def check_alone(lab):
    """A rank that is alone keeps what it has."""
    need_sums(lab, 1, 10)


def check_long(lab):
    """Vectors of 4 MiB arrive as well."""
    need_sums(lab, 2, LONG)


def check_bits(lab):
    """All ranks hold the same bits."""
    ranks = lab.ranks("adds", 3, 10)
    for rank, found in enumerate(ranks[1:], 1):
        need_same(found["results"][0], ranks[0]["results"][0], f"rank {rank} beside rank 0")


def check_messages(lab):
    """It is done by messages alone, and each that is sent is received."""
    sent = [name for found in lab.ranks("adds", 3, 10) for name, _ in found["sent"]]
    others = sorted({name for name in sent if name not in ALLOWED})
    need(not others, f"dpcore's core has also run {', '.join(others)}")
    gone, come = sent.count("send"), sent.count("recv")
    need(gone > 0, "no message was sent")
    need(gone == come, f"{gone} messages were sent and {come} received")
