"""Attention in a ring (35 minutes)

A sequence is too long for one rank, so each rank has some of its tokens: their queries, keys and
values. Every query has to meet every key. Queries stay where they are, and keys and values go
round: in each of world_size - 1 steps, every rank sends what it has to its right neighbour
(rank + 1) and receives from its left one (rank - 1).

A softmax needs the sum of all exponentials of its row, and no rank ever has a whole row of scores.
It is enough to know two things of the keys that were seen so far:

    lse    the logarithm of the sum of the exponentials of their scores, one for each query
    out    the mean of their values, weighted by these exponentials over their sum

`join` makes those of two blocks together: the sum of the exponentials is the sum of both sums, and
each mean counts by its share of it. Scores may be in the hundreds, where exp() is infinite, so
take exponentials of differences only.

    comm.send(tensor, dst, async_op=True)    returns at once; .wait() on what it returns waits
    comm.recv(tensor, src)                   waits until the message is there, in this tensor

A send may wait for its receiver, and its tensor belongs to the message until ``wait()``.

Nothing is masked here. docs/learn/18-a-sequence-in-a-ring.md says what a mask changes.
"""

import torch


def block(q, k, v):
    """Attention of these queries to these keys: the weighted mean of the values, and lse."""
    scores = q @ k.T / q.shape[1] ** 0.5
    lse = scores.logsumexp(1)
    return (scores - lse[:, None]).exp() @ v, lse


def join(out, lse, more, its_lse):
    """``out`` and ``lse`` of two blocks together, which is also what it returns. ``out`` and
    ``more`` are [queries, dim], ``lse`` and ``its_lse`` [queries]."""
    #: solution
    both = torch.logaddexp(lse, its_lse)
    mine, its = (lse - both).exp(), (its_lse - both).exp()
    return out * mine[:, None] + more * its[:, None], both
    #: instead
    #| raise NotImplementedError("each mean counts by its share of the sum")
    #: end


def ring_attention(comm, q, k, v):
    """Attention of this rank's queries to the keys of all ranks, without the lse: [queries, dim].
    All ranks have the same number of tokens."""
    right = (comm.rank + 1) % comm.world_size
    left = (comm.rank - 1) % comm.world_size
    #: solution
    out, lse = block(q, k, v)
    for _ in range(comm.world_size - 1):
        came = torch.empty_like(k), torch.empty_like(v)
        works = [comm.send(tensor, right, async_op=True) for tensor in (k, v)]
        for tensor in came:
            comm.recv(tensor, left)
        for work in works:
            work.wait()
        k, v = came
        out, lse = join(out, lse, *block(q, k, v))
    return out
    #: instead
    #| raise NotImplementedError("begin with this rank's own keys, then join what comes")
    #: end


#: hint
#| `torch.logaddexp(a, b)` is log(exp(a) + exp(b)), and does not overflow. The share of the first
#| block is exp(lse - that).
#: hint
#| A share is one number for each query, and `out` has a row for each: `share[:, None]` has the
#| shape that a product with rows needs.
#: hint
#| What you received is what you send in the next step. Receive into new tensors: the ones that you
#| send are still on their way.
#: end
