"""More of the exercises about messages; mutants.py says how to read it."""

TEXT = """
== all_reduce | receives into the vector | two_ranks | they are those of rank 1 alone
--
        comm.recv(part, rank)
        vector += part
++
        comm.recv(vector, rank)

== all_reduce | leaves out the last rank | two_ranks | the ranks wait for each other
~ range(1, comm.world_size) => range(1, comm.world_size - 1)

== all_reduce | the mean | two_ranks | they are the means over 2 ranks
--
    for rank in range(1, comm.world_size):
        comm.send(vector, rank)
++
    vector /= comm.world_size
    for rank in range(1, comm.world_size):
        comm.send(vector, rank)

== all_reduce | adds what comes twice | two_ranks | rank 1's are in it 2 times
~         vector += part =>         vector += 2 * part

== all_reduce | sends before all is there | three_ranks | rank 2's are missing
--
        vector += part
    for rank in range(1, comm.world_size):
        comm.send(vector, rank)
++
        vector += part
        comm.send(vector, rank)

== all_reduce | forgets rank 0 | two_ranks | they are those of rank 1 alone
~     part = torch.empty_like(vector) =>     part = torch.empty_like(vector.zero_())

== all_reduce | always single precision | types | raised Mismatch
~ torch.empty_like(vector) => torch.empty(len(vector))

== all_reduce | always ten elements | two_ranks | raised Mismatch
~ torch.empty_like(vector) => vector.new_empty(10)

== all_reduce | keeps the first part | two_ranks | raised Mismatch
--
    part = torch.empty_like(vector)
++
    if not PARTS:
        PARTS.append(torch.empty_like(vector))
    part = PARTS[0]
--
def all_reduce(
++
PARTS = []


def all_reduce(

== all_reduce | three ranks at most | three_ranks | the ranks wait for each other
~ range(1, comm.world_size) => range(1, min(3, comm.world_size))

== all_reduce | all values go round | bits | the last bits differ
--
    if comm.rank != 0:
++
    part = vector.clone()
    for _ in range(comm.world_size - 1):
        comm.send(part, (comm.rank + 1) % comm.world_size)
        comm.recv(part, (comm.rank - 1) % comm.world_size)
        vector += part
    return
    if comm.rank != 0:

== all_reduce | begins to send and never waits | messages | nothing waits for the send
~         comm.send(vector, rank) =>         comm.send(vector, rank, async_op=True)

== all_reduce | receives into what it sends | messages | was changed before wait()
--
        comm.send(vector, 0)
        comm.recv(vector, 0)
++
        work = comm.send(vector, 0, async_op=True)
        comm.recv(vector, 0)
        work.wait()

== ring | * never waits | waits | nothing waits for the send
~         work.wait() =>

== ring | waits in the first round only | waits | nothing waits for the send
--
        comm.recv(take, left)
        work.wait()
++
        comm.recv(take, left)

== ring | waits in the second round only | waits | nothing waits for the send
--
        comm.recv(part, left)
        work.wait()
++
        comm.recv(part, left)

== ring | waits for all at the end | waits | was changed before wait()
~         work.wait() =>
--
        comm.recv(take, left)
++
        comm.recv(take, left)
    for work in works:
        work.wait()
--
        work = comm.send(give, right, async_op=True)
++
        works += [comm.send(give, right, async_op=True)]
--
    left = (comm.rank - 1) % comm.world_size
++
    left, works = (comm.rank - 1) % comm.world_size, []

== ring | * all send first | stands | these ranks wait for each other for ever
~         work = comm.send(give, right, async_op=True) =>         comm.send(give, right)
~         work.wait() =>

== ring | waits before it receives | stands | these ranks wait for each other for ever
~ comm.send(give, right, async_op=True) => comm.send(give, right, async_op=True).wait()
~         work.wait() =>

== ring | one rank after the other | steps | messages come one after the other
--
        work = comm.send(give, right, async_op=True)
        comm.recv(part, left)
        work.wait()
++
        if comm.rank == 0:
            comm.send(give, right)
            comm.recv(part, left)
        else:
            comm.recv(part, left)
            comm.send(give, right)

== ring | adds in the second round as well | sums | chunk 0: rank 0's are in it 2 times
--
        comm.recv(take, left)
++
        part = torch.empty_like(take)
        comm.recv(part, left)
        take += part

== ring | copies in the first round | sums | still this rank's own
~         take += part =>         take.copy_(part)

== ring | begins the second round with its own | sums | still this rank's own
~ (comm.rank + 1 - step) => (comm.rank - step)
--
        take = chunks[(comm.rank - step) % comm.world_size]
++
        take = chunks[(comm.rank - step - 1) % comm.world_size]

== ring | adds to the chunk that it sends | sums | chunk 0: those of rank 2 alone
--
        take = chunks[(comm.rank - step - 1) % comm.world_size]
++
        take = chunks[(comm.rank - step) % comm.world_size]

== ring | one step too many | steps | are right
~ range(comm.world_size - 1) => range(comm.world_size)

== ring | divides | sums | they are the means over 3 ranks
--
        comm.recv(take, left)
        work.wait()
++
        comm.recv(take, left)
        work.wait()
    vector /= comm.world_size

== ring | chunks of one size | again | raised Mismatch
~ torch.empty_like(take) => torch.empty_like(chunks[0])

== ring | always single precision | again | raised Mismatch
~ torch.empty_like(take) => torch.empty(len(take))

== ring | torch.chunk | short | raised IndexError
~ vector.tensor_split( => vector.chunk(

== ring | the other way round | neighbours | and not
~ right = (comm.rank + 1) => right = (comm.rank - 1)
~ left = (comm.rank - 1) => left = (comm.rank + 1)

== reduce_scatter | never waits | waits | nothing waits for the send
--
    for work in works:
        work.wait()
++

== reduce_scatter | waits for the last one only | waits | nothing waits for the send
--
    for work in works:
        work.wait()
++
    if works:
        works[-1].wait()

== reduce_scatter | waits before it receives | stands | these ranks wait for each other for ever
--
    for work in works:
        work.wait()
++
--
    total = torch
++
    for work in works:
        work.wait()
    total = torch

== reduce_scatter | all send first | stands | these ranks wait for each other for ever
~ comm.send(parts[rank], rank, async_op=True) => comm.send(parts[rank], rank)
--
    for work in works:
        work.wait()
++

== reduce_scatter | * sums in double precision | order | in double precision, and rounded
~     return total =>     return total.to(vector.dtype)
~ torch.zeros_like(parts[comm.rank]) => torch.zeros(len(parts[comm.rank]), dtype=torch.float64)
--
            comm.recv(part, rank)
++
            part = torch.empty_like(parts[comm.rank])
            comm.recv(part, rank)

== reduce_scatter | gives double precision | parts | is of type float64
~     return total =>     return total.double()

== reduce_scatter | the mean | parts | they are the means over 3 ranks
~     return total =>     return total / comm.world_size

== reduce_scatter | forgets its own | parts | rank 0's are missing
~             total += parts[rank] =>             pass

== reduce_scatter | sends its own part to all | parts | elements are wrong
~ comm.send(parts[rank], rank, => comm.send(parts[comm.rank], rank,

== reduce_scatter | from the last to the first | order | added in the order 3, 2, 1, 0
--
    for rank in range(comm.world_size):
++
    for rank in reversed(range(comm.world_size)):

== reduce_scatter | its own at last | order | added in the order 1, 2, 3, 0
--
        if rank == comm.rank:
            total += parts[rank]
        else:
++
        if rank != comm.rank:
--
    for work in works:
++
    total += parts[comm.rank]
    for work in works:

== reduce_scatter | forgets the last rank | parts | rank 2's are missing
--
    for rank in range(comm.world_size):
++
    for rank in range(comm.world_size - 1):

== reduce_scatter | always single precision | again | raised Mismatch
~ torch.empty_like(total) => torch.empty(len(total))

== reduce_scatter | gives the whole sum back | parts | the shape is
~     return total =>     return torch.cat([total] * comm.world_size)

== ring_attention | never waits | waits | nothing waits for the send
--
        for work in works:
            work.wait()
++

== ring_attention | waits for values only | waits | nothing waits for the send
--
        for work in works:
            work.wait()
++
        works[1].wait()

== ring_attention | waits before it receives | steps | these ranks wait for each other for ever
--
        for tensor in came:
            comm.recv(tensor, left)
        for work in works:
            work.wait()
++
        for work in works:
            work.wait()
        for tensor in came:
            comm.recv(tensor, left)

== ring_attention | all send first | steps | these ranks wait for each other for ever
~ comm.send(tensor, right, async_op=True) => comm.send(tensor, right)
--
        for work in works:
            work.wait()
++

== ring_attention | receives into what it sends | waits | was changed before wait()
--
    out, lse = block(q, k, v)
++
    came = torch.empty_like(k), torch.empty_like(v)
    out, lse = block(q, k, v)
~         came = torch.empty_like(k), torch.empty_like(v) =>

== ring_attention | one rank after the other | steps | messages come one after the other
--
        works = [comm.send(tensor, right, async_op=True) for tensor in (k, v)]
        for tensor in came:
            comm.recv(tensor, left)
        for work in works:
            work.wait()
++
        for tensor, mine in zip(came, (k, v)):
            if comm.rank == 0:
                comm.send(mine, right)
            comm.recv(tensor, left)
            if comm.rank != 0:
                comm.send(mine, right)

== ring_attention | adds logarithms | join | elements are wrong
~ torch.logaddexp(lse, its_lse) => lse + its_lse

== ring_attention | the larger logarithm | join | elements are wrong
~ torch.logaddexp(lse, its_lse) => torch.maximum(lse, its_lse)

== ring_attention | keeps the old logarithm | join | elements are wrong
--
    return out * mine[:, None] + more * its[:, None], both
++
    return out * mine[:, None] + more * its[:, None], lse

== ring_attention | shares without an axis | join | raised RuntimeError
~ out * mine[:, None] + more * its[:, None] => out * mine + more * its

== ring_attention | only keys go on | values | elements are wrong
~         k, v = came =>         k = came[0]

== ring_attention | takes keys for values | values | elements are wrong
~         for tensor in came: =>         for tensor in reversed(came):

== ring_attention | its own block twice | values | elements are wrong
~     for _ in range(comm.world_size - 1): =>     for _ in range(comm.world_size):

== ring_attention | single precision in between | join | was a type of 32 bits
--
    both = torch.logaddexp(lse, its_lse)
++
    both = torch.logaddexp(lse.float(), its_lse.float()).double()
"""
