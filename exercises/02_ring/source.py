"""A ring (30 minutes)

In the first exercise, rank 0 receives everything and sends everything: the more ranks, the longer
it takes. In a ring each rank talks to its neighbours only, and all of them send at the same time.

The vector is cut into as many chunks as there are ranks. In each of the first world_size - 1
steps, every rank sends a chunk to its right neighbour (rank + 1), receives another from its left
one (rank - 1), and adds that to its own. Then each rank holds one chunk that is complete. In
world_size - 1 further steps the complete chunks go around once, and are copied instead of added.

    step        rank 0        rank 1        rank 2
    0           sends 0       sends 1       sends 2       and adds what comes
    1           sends 2       sends 0       sends 1       and adds what comes
    2           sends 1       sends 2       sends 0       complete ones from here on
    3           sends 0       sends 1       sends 2

    comm.send(tensor, dst, async_op=True)    returns at once; .wait() on what it returns waits
    comm.recv(tensor, src)                   as before

A send may wait for its receiver, so if all ranks send before any receives, a ring can stand still:
begin to send, receive, then wait. Until ``wait()`` the tensor that is sent belongs to the message.
docs/learn/2-moves.md says how many bytes this costs, and why nothing is cheaper.
"""

import torch


def ring_all_reduce(comm, vector):
    """Leaves the sum of all ranks' vectors in ``vector``, on every rank."""
    chunks = vector.tensor_split(comm.world_size)  # views of the vector; some may be empty
    right = (comm.rank + 1) % comm.world_size
    left = (comm.rank - 1) % comm.world_size
    #: solution
    for step in range(comm.world_size - 1):
        give = chunks[(comm.rank - step) % comm.world_size]
        take = chunks[(comm.rank - step - 1) % comm.world_size]
        part = torch.empty_like(take)
        work = comm.send(give, right, async_op=True)
        comm.recv(part, left)
        work.wait()
        take += part
    for step in range(comm.world_size - 1):
        give = chunks[(comm.rank + 1 - step) % comm.world_size]
        take = chunks[(comm.rank - step) % comm.world_size]
        work = comm.send(give, right, async_op=True)
        comm.recv(take, left)
        work.wait()
    #: instead
    #| raise NotImplementedError("two rounds of world_size - 1 steps each")
    #: end


#: hint
#| In step s of the first round, rank r sends chunk r - s (modulo world_size). What comes from the
#| left neighbour in the same step is what *it* sends: chunk (r - 1) - s.
#: hint
#| If every rank first sends and then receives, who takes the first message? dpcore keeps messages
#| that nobody has asked for yet. Others do not if they are long, and then all ranks wait for ever.
#| `work = comm.send(..., async_op=True)`, then `comm.recv(...)`, then `work.wait()` works anywhere.
#: hint
#| After the first round, rank r holds chunk r + 1 complete. The second round begins with sending
#| that one.
#: end
