"""All-reduce by hand (15 minutes)

Every rank holds a vector of the same length. Afterwards every rank is to hold the sum of all of
them, in the same memory. Data parallel training needs nothing else from the network.

All you have is messages:

    comm.rank, comm.world_size     this rank's number, and how many ranks there are
    comm.send(tensor, dst)         sends a tensor to rank dst
    comm.recv(tensor, src)         waits for a message from rank src and writes it into the tensor

Any way will do; the next exercise is about a good one. The simplest has one rank that collects
and adds, and hands the result back. All ranks have to hold the same bits: numbers with a floating
point add up to something else in another order, so if every rank adds for itself, they have to add
in the same order. Read docs/learn/1-the-mean.md first.
"""

import torch


def all_reduce(comm, vector):
    """Leaves the sum of all ranks' vectors in ``vector``, on every rank."""
    #: solution
    if comm.rank != 0:
        comm.send(vector, 0)
        comm.recv(vector, 0)
        return
    part = torch.empty_like(vector)
    for rank in range(1, comm.world_size):
        comm.recv(part, rank)
        vector += part
    for rank in range(1, comm.world_size):
        comm.send(vector, rank)
    #: instead
    #| part = torch.empty_like(vector)  # room for what another rank sends
    #| raise NotImplementedError("send, receive and add")
    #: end


#: hint
#| Rank 0 does something else than the others: it receives from each of them, one after the other,
#| and adds. `part` is a place for what comes; receiving into `vector` would lose what is there.
#: hint
#| `vector = vector + part` makes another tensor, and the caller's stays as it was. `vector += part`
#| adds in place.
#: hint
#| Every message that is sent has to be received. The others send their vector to rank 0, then
#| receive the sum from rank 0 into the same memory.
#: end
