"""Checks of the exercise beside this file."""

import torch

from dpcore.school.exercise.explaining import Origin
from dpcore.school.exercise.judging import need, need_same, need_values, need_waited, need_written

ALLOWED = ("send", "recv")
SHORT, LONG = 11, 1 << 20  # 11: no multiple of 2, 3 or 4


def vector(rank, length, call, dtype="float32"):
    generator = torch.Generator().manual_seed(1000 * call + rank)
    drawn = torch.randn(length, generator=generator, dtype=torch.float64)
    return (100 * drawn if "int" in dtype else drawn).to(getattr(torch, dtype))


def adds(on, student, length, dtype="float32"):
    """Two calls, the second with a longer vector."""
    found = {"results": []}
    with on.watch() as seen:
        for call in range(2):
            mine = vector(on.rank, length + call, call, dtype)
            student.all_reduce(on.comm, mine)
            found["results"].append(mine)
    return found | {"sent": seen.sent(), "misuse": on.misuse()}


def need_sums(lab, world, length, call=0, dtype="float32"):
    terms = [vector(rank, length + call, call, dtype) for rank in range(world)]
    whole = sum(term.double() for term in terms).to(terms[0].dtype).numpy()
    terms = [term.numpy() for term in terms]
    for rank, found in enumerate(lab.ranks("adds", world, length, dtype)):
        what = f"rank {rank} of {world}" + (", second call" if call else "")
        what += "" if dtype == "float32" else f", {dtype}"
        need_written(found["results"][call], terms[rank], world, what)
        need_values(found["results"][call], whole, what, origin=Origin(terms, rank))


def check_two_ranks(lab):
    """Two ranks both hold the sum, in the vector that was handed over."""
    need_sums(lab, 2, SHORT)


def check_three_ranks(lab):
    """Three ranks hold the sum as well, and so do four."""
    need_sums(lab, 3, SHORT)
    need_sums(lab, 4, SHORT)


def check_again(lab):
    """A second call, with a longer vector, is right as well: nothing of the first is left over."""
    need_sums(lab, 3, SHORT, call=1)


def check_alone(lab):
    """A rank that is alone keeps what it has."""
    need_sums(lab, 1, SHORT)


def check_long(lab):
    """Vectors of 4 MiB arrive as well."""
    need_sums(lab, 2, LONG)


def check_types(lab):
    """Numbers may be of another type: doubles and integers are added as well."""
    need_sums(lab, 3, SHORT, dtype="float64")
    need_sums(lab, 3, SHORT, dtype="int64")


def check_bits(lab):
    """All ranks hold the same bits."""
    ranks = lab.ranks("adds", 3, SHORT, "float32")
    for rank, found in enumerate(ranks[1:], 1):
        need_same(found["results"][0], ranks[0]["results"][0], f"rank {rank} beside rank 0")


def check_messages(lab):
    """It is done by messages alone, and each that is sent is received."""
    ranks = lab.ranks("adds", 3, SHORT, "float32")
    sent = [name for found in ranks for name, _ in found["sent"]]
    others = sorted({name for name in sent if name not in ALLOWED})
    need(not others, f"dpcore's core has also run {', '.join(others)}")
    gone, come = sent.count("send"), sent.count("recv")
    need(gone > 0, "no message was sent")
    need(gone == come, f"{gone} messages were sent and {come} received")
    need_waited([found["misuse"] for found in ranks])
