"""Rows of the table for ranks that call different things (11-16 of the catalogue).

Every rank, the odd one included, raises Mismatch, naming what both sides called; no byte of
anybody's data has changed, and the processes live on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import cloudpickle
import torch

from .scenarios import FATAL, Scenario, mark

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@dataclass(frozen=True)
class Disagreement:
    """``make(comm, odd)`` returns the tensors and the call that a rank makes with them."""

    item: int
    name: str
    make: Callable
    usual: str  # what the message says of the others, a regular expression
    odd: str  # and of the odd rank


def steps_of(make):
    def steps(comm, scenario, stamp):
        for _ in range(FATAL):
            comm.barrier()
        odd = comm.rank == scenario.victim
        tensors, call = make(comm, odd)
        before = [tensor.clone() for tensor in tensors]
        if odd:
            mark(stamp)
        try:
            call()
        finally:
            assert all(map(torch.equal, tensors, before)), "data was touched"

    return steps


def filled(comm, count, dtype=torch.float32, arena=False):
    tensor = comm.empty(count, dtype=dtype) if arena else torch.empty(count, dtype=dtype)
    return tensor.fill_(comm.rank + 1)


def reduces(usual, odd, arena=False, **options):
    """An all_reduce of ``(count, dtype, op)``."""

    def make(comm, is_odd):
        count, dtype, op = odd if is_odd else usual
        tensor = filled(comm, count, dtype, arena)

        def call():
            work = comm.all_reduce(tensor, op, **options)
            if work is not None:
                work.wait()

        return [tensor], call

    return make


def said(count, dtype="float32", op="sum"):
    return rf"all_reduce of {count} x {dtype}, {op}\)"


def kinds(comm, odd):
    tensor = filled(comm, 100)
    return [tensor], (lambda: comm.broadcast(tensor)) if odd else (lambda: comm.all_reduce(tensor))


def parts(comm, odd):
    whole, part = filled(comm, 8 * comm.world_size), filled(comm, 8)
    call = comm.reduce_scatter if odd else comm.all_gather
    args = (part, whole) if odd else (whole, part)
    return [whole, part], lambda: call(*args)


def order(comm, odd):
    small, large = filled(comm, 10), filled(comm, 20)

    def call():
        for tensor in (large, small) if odd else (small, large):
            comm.all_reduce(tensor)

    return [small, large], call


def skipped(comm, odd):
    first, second = filled(comm, 10), filled(comm, 20)

    def call():
        if not odd:
            comm.all_reduce(first)
        comm.all_reduce(second)

    return [first, second], call


def root(comm, odd):
    tensor = filled(comm, 100)

    def call():
        comm.broadcast(tensor, root=1 if odd else 0)
        comm.barrier()  # two roots that only give compare at the next call (decision 7)

    is_root = comm.rank == (1 if odd else 0)
    return [tensor] if is_root else [], call  # who takes has taken from its own root (decision 36)


def algorithm(comm, odd):
    tensor = filled(comm, 100)
    return [tensor], lambda: comm.all_reduce(tensor, algorithm="ring" if odd else "two_shot")


def layout(comm, odd):
    tensor = filled(comm, 100)
    return [tensor], lambda: comm.all_reduce(tensor, layout=11 if odd else 12)


def split(comm, odd):
    tensor = filled(comm, 100)
    return [tensor], (lambda: comm.split(0)) if odd else (lambda: comm.all_reduce(tensor))


def size_lists(comm, odd):
    # Each rank's own part is the same in both lists: only the list as a whole differs.
    sizes = [4] * comm.world_size
    other = (comm.rank + 1) % comm.world_size
    sizes[other] += 1 if odd else 0
    whole, part = filled(comm, sum(sizes)), filled(comm, 4)
    return [whole, part], lambda: comm.all_gather(whole, part, sizes=sizes)


F32, I32 = torch.float32, torch.int32
DISAGREEMENTS = (
    Disagreement(
        11, "shape", reduces((100, F32, "sum"), (101, F32, "sum")), said(100), said(101)
    ),
    Disagreement(
        11, "shape-in-the-arena", reduces((1 << 18, F32, "sum"), (1 << 17, F32, "sum"), True),
        said(1 << 18), said(1 << 17),
    ),
    Disagreement(
        11, "shape-async", reduces((1 << 18, F32, "sum"), (0, F32, "sum"), async_op=True),
        said(1 << 18), said(0),
    ),
    Disagreement(
        11, "size-lists", size_lists, "all_gather of .*lists of sizes", "all_gather of "
    ),
    Disagreement(
        12, "dtype", reduces((100, F32, "sum"), (100, I32, "sum")),
        said(100), said(100, "int32"),
    ),
    Disagreement(
        12, "dtype-in-the-arena", reduces((1 << 18, F32, "sum"), (1 << 18, I32, "sum"), True),
        said(1 << 18), said(1 << 18, "int32"),
    ),
    Disagreement(
        13, "op", reduces((100, F32, "sum"), (100, F32, "max")), said(100), said(100, op="max")
    ),
    Disagreement(
        13, "mean", reduces((1 << 18, F32, "sum"), (1 << 18, F32, "mean"), True),
        said(1 << 18), said(1 << 18, op="mean"),
    ),
    Disagreement(14, "kind", kinds, said(100), r"broadcast of 100 x float32, root 0\)"),
    Disagreement(14, "parts", parts, "all_gather of 8 x", "reduce_scatter of 8 x float32, sum"),
    Disagreement(14, "order", order, said(10), said(20)),
    Disagreement(14, "root", root, "broadcast of 100 x float32, root 0", "broadcast .* root 1"),
    Disagreement(14, "algorithm", algorithm, said(100) + ".*the algorithms differ", said(100)),
    Disagreement(14, "split", split, said(100), "all_gather of .* x uint8"),
    Disagreement(15, "skipped", skipped, said(10), said(20)),
    Disagreement(16, "layout", layout, said(100) + ".*layout of the buckets", said(100)),
)  # fmt: skip


# ---- disagreements that only those concerned can see; the others hear of them -----------------


def uneven_exchange(comm, scenario, stamp):
    """Rank 1 sends one element more to rank 2 than rank 2 expects."""
    world = comm.world_size
    sends, takes = [2] * world, [2] * world
    sends[2] += 1 if comm.rank == 1 else 0
    output, input = filled(comm, sum(takes)), filled(comm, sum(sends))
    if comm.rank == 1:
        mark(stamp)
    comm.all_to_all(output, input, output_sizes=takes, input_sizes=sends)
    comm.barrier()


def message_of(sent, expected):
    def steps(comm, scenario, stamp):
        if comm.rank == 1:
            mark(stamp)
            comm.send(sent(comm), 2, tag=3)
        if comm.rank == 2:
            comm.recv(expected(comm), 1, tag=3)
        comm.barrier()

    return steps


def rows():
    for case in DISAGREEMENTS:
        everywhere = ((2, 0), (2, 1), (3, 0), (3, 1), (3, 2), (4, 2))
        for world, victim in everywhere if case.name == "shape" else ((3, 1), (2, 1)):
            says = (
                f"the ranks disagree at operation {FATAL}: ",
                rf"rank [^{{victim}}] called operation {FATAL} \({case.usual}",
                rf"rank {{victim}} called operation {FATAL} \({case.odd}",
                "was done with it by then" if case.name == "root" else "No data was touched",
            )
            yield Scenario(
                case.item, case.name, world, victim, "Mismatch", steps_of(case.make),
                says=says, victim_error="Mismatch",
            )  # fmt: skip
    yield Scenario(
        11, "uneven-exchange", 4, 1, "Mismatch", uneven_exchange,
        says=("rank 1 sends 3 elements to rank 2, which expects 2",), victim_error="Mismatch",
    )  # fmt: skip
    for name, sent, expected, says in (
        ("message-size", (100, F32), (50, F32), "has 400 bytes of float32, but 200 of float32"),
        ("message-dtype", (100, F32), (100, I32), "has 400 bytes of float32, but 400 of int32"),
    ):
        yield Scenario(
            11, name, 3, 1, "Mismatch",
            message_of(lambda comm, a=sent: filled(comm, *a), lambda c, a=expected: filled(c, *a)),
            says=(r"a message from rank 1 \(tag 3\) " + says,), victim_error="Mismatch",
        )  # fmt: skip


TABLE = list(rows())
