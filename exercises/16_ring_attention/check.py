"""Checks of the exercise beside this file."""

import math

import torch

from dpcore.school.exercise.judging import (
    Wrong,
    need,
    need_same,
    need_to_end,
    need_values,
    need_waited,
)

ALLOWED = ("send", "recv")
TOKENS, DIM = 6, 4  # of a rank


def drawn(rank, scale=1.0):
    numbers = torch.Generator().manual_seed(40 + rank)
    q, k, v = torch.randn(3, TOKENS, DIM, generator=numbers, dtype=torch.float64)
    return q * scale, k, v


def softmax_of(q, k, v):
    """One process, with whole rows of scores."""
    return (q @ k.T / math.sqrt(DIM)).softmax(1) @ v


def attends(on, student, scale=1.0):
    """What came out, what was sent, and how many keys each call of ``join`` was about."""
    joined, own = [], student.join

    def noted(out, lse, more, its_lse):
        joined.append(list(out.shape))
        return own(out, lse, more, its_lse)

    student.join = noted
    given = drawn(on.rank, scale)
    q, k, v = (tensor.clone() for tensor in given)
    with on.watch() as seen:
        result = student.ring_attention(on.comm, q, k, v)
    return {
        "result": result,
        "given": [q, k, v],
        "sent": seen.sent(),
        "calls": list(on.calls),
        "misuse": on.misuse(),
        "joined": joined,
    }


def joins(on, student, scale):
    """Two blocks of unlike weight, joined in both orders, and a block with nothing."""
    q, k, v = drawn(0, scale)
    left, right = student.block(q, k[:2], v[:2]), student.block(q, k[2:], v[2:])
    nothing = torch.zeros_like(q), torch.full((TOKENS,), -torch.inf, dtype=q.dtype)
    return [
        list(student.join(*(tensor.clone() for tensor in (*one, *other))))  # it may be in place
        for one, other in ((left, right), (right, left), (nothing, student.block(q, k, v)))
    ]


def need_joined(lab, scale):
    (found,) = lab.ranks("joins", 1, scale)
    q, k, v = drawn(0, scale)
    scores = q @ k.T / math.sqrt(DIM)
    names = ("of 2 and of 4 keys", "of 4 and of 2 keys", "of no keys yet and of all")
    for name, pair in zip(names, found, strict=True):
        need(len(pair) == 2, f"join gives {len(pair)} things; out and lse are right")
        need_values(pair[1], scores.logsumexp(1).numpy(), f"blocks {name}: lse", 1e-10)
        need_values(pair[0], softmax_of(q, k, v).numpy(), f"blocks {name}: out", 1e-10)


def need_attention(lab, world, scale=1.0):
    drawns = [drawn(rank, scale) for rank in range(world)]
    keys, values = (torch.cat([one[at] for one in drawns]) for at in (1, 2))
    for rank, found in enumerate(lab.ranks("attends", world, scale)):
        expected = softmax_of(drawns[rank][0], keys, values).numpy()
        need_values(found["result"], expected, f"rank {rank} of {world}", 1e-10)


def check_join(lab):
    """`join` of two blocks is attention to the keys of both."""
    need_joined(lab, 1.0)


def check_large(lab):
    """So it is with scores in the hundreds."""
    need_joined(lab, 1000.0)


def check_values(lab):
    """With three ranks, each has what one process computes for its queries."""
    need_attention(lab, 3)


def check_others(lab):
    """So it is with two ranks, with four, and with one."""
    for world in (2, 4, 1):
        need_attention(lab, world)


def check_as_they_come(lab):
    """Each block is joined to what is known, and no rank has a whole row of scores."""
    for rank, found in enumerate(lab.ranks("attends", 4, 1.0)):
        count = len(found["joined"])
        need(
            count in (3, 4),
            f"rank {rank} of 4 joins {count} times, where 3 blocks come to its own",
        )


def check_neighbours(lab):
    """Each rank sends to its right neighbour and receives from its left one only."""
    for rank, found in enumerate(lab.ranks("attends", 4, 1.0)):
        for name, peer, *_ in found["calls"]:
            if name == "wait":
                continue
            right = (rank + (1 if name == "send" else -1)) % 4
            need(peer == right, f"rank {rank} calls {name} with rank {peer}, and not {right}")


def check_waits(lab):
    """Every send is waited for, and what it sends is left alone until then."""
    need_waited([found["misuse"] for found in lab.ranks("attends", 4, 1.0)])


def check_steps(lab):
    """All ranks send at the same time, and it ends where a send waits for its receiver: three steps
    with four ranks."""
    steps = need_to_end([found["calls"] for found in lab.ranks("attends", 4, 1.0)]).steps
    need(steps == 3, f"{steps} messages come one after the other, and 3 are right")


def check_bytes(lab):
    """A rank sends keys and values of world_size - 1 ranks: queries stay, and so do scores."""
    wanted = 3 * 2 * TOKENS * DIM * 8
    for rank, found in enumerate(lab.ranks("attends", 4, 1.0)):
        sent = sum(nbytes for name, nbytes in found["sent"] if name == "send")
        need(sent == wanted, f"rank {rank} sends {sent} bytes, and {wanted} are enough and needed")


def check_untouched(lab):
    """Queries, keys and values that were handed over are as they were."""
    for rank, found in enumerate(lab.ranks("attends", 3, 1.0)):
        for name, kept, given in zip("qkv", found["given"], drawn(rank), strict=True):
            try:
                need_same(kept, given.numpy(), f"rank {rank}, {name}")
            except Wrong as problem:
                raise Wrong(f"{problem}: receive into tensors of your own") from None
