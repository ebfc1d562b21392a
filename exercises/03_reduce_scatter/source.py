"""Reduce-scatter by hand (25 minutes)

The first half of a ring leaves each rank with one chunk of the sum. That is an operation of its
own: of the sum of all ranks' vectors, rank r gets part number r. No rank has to hold the whole sum,
which is what ZeRO lives on (exercise 11), and an all-gather of the parts makes an all-reduce of it.

This time the bits matter. Numbers with a floating point do not add up to the same when they are
added in another order, so the order is prescribed: rank 0's, plus rank 1's, plus rank 2's, and so
on. Then the result does not depend on who adds. (A ring can't do that. Why?)

    comm.send(tensor, dst, async_op=True)    returns at once; .wait() on what it returns waits
    comm.recv(tensor, src)                   waits for a message from that rank

A send may wait for its receiver, so ranks that all wait before they receive can stand still. Every
send is waited for. The vector of the caller stays as it is. docs/learn/7-the-same-bits.md is about
the order.
"""

import torch


def reduce_scatter(comm, vector):
    """Returns the sum of part number ``comm.rank`` of all ranks' vectors, added in rank order."""
    parts = vector.tensor_split(comm.world_size)  # views; part r is for rank r
    #: solution
    others = [rank for rank in range(comm.world_size) if rank != comm.rank]
    works = [comm.send(parts[rank], rank, async_op=True) for rank in others]
    total = torch.zeros_like(parts[comm.rank])
    for rank in range(comm.world_size):
        if rank == comm.rank:
            total += parts[rank]
        else:
            part = torch.empty_like(total)
            comm.recv(part, rank)
            total += part
    for work in works:
        work.wait()
    return total
    #: instead
    #| raise NotImplementedError("send each rank its part, and add up what comes")
    #: end


#: hint
#| Every rank sends part r of its own vector to rank r, for all r but its own. These messages can
#| all be on their way at once: `async_op=True`, and wait for them at the end.
#: hint
#| Begin with zeros and go through the ranks 0, 1, 2, ...: receive from each and add, and where the
#| rank is your own, add your own part. That is the prescribed order on every rank.
#: end
