"""Of the exercises about messages and plans; mutants.py says how to read it."""

TEXT = """
== all_reduce | keeps the sum | two_ranks | the ranks wait for each other
--
    for rank in range(1, comm.world_size):
        comm.send(vector, rank)
++
    return

== all_reduce | * adds into another tensor | two_ranks | rank 0 of 2: the vector is what it was
--
        vector += part
++
        vector = vector + part

== all_reduce | each adds its own first | bits | added in another order
--
    if comm.rank != 0:
++
    part = torch.empty_like(vector)
    mine, others = vector.clone(), [r for r in range(comm.world_size) if r != comm.rank]
    for rank in others:
        comm.send(mine, rank)
    for rank in others:
        comm.recv(part, rank)
        vector += part
    return
    if comm.rank != 0:

== all_reduce | two ranks only | three_ranks | the ranks wait for each other
--
range(1, comm.world_size)
++
range(1, min(2, comm.world_size))

== all_reduce | sends what nobody receives | messages | were sent and
--
        comm.send(vector, 0)
++
        comm.send(vector, 0)
        comm.send(vector, 0, tag=5, async_op=True)

== all_reduce | calls the collective | messages | dpcore's core has also run all_reduce
--
    if comm.rank != 0:
++
    import dpcore

    if comm.world_size > 1:
        return dpcore.current().all_reduce(vector)
    if comm.rank != 0:

== all_reduce | comm has none | two_ranks | comm.all_reduce is not part of this exercise
--
    if comm.rank != 0:
++
    if comm.world_size > 1:
        return comm.all_reduce(vector)
    if comm.rank != 0:

== ring | waits before it sends | sums | the ranks wait for each other
--
        work = comm.send(give, right, async_op=True)
        comm.recv(part, left)
++
        comm.recv(part, left)
        work = comm.send(give, right, async_op=True)

== ring | * one round too short | sums | rank 1's are missing
--
        comm.recv(take, left)
        work.wait()
++
        comm.recv(take, left)
        work.wait()
        if step == comm.world_size - 3:
            break

== ring | the whole vector in each step | bytes | are enough and needed
--
        part = torch.empty_like(take)
        work = comm.send(give, right, async_op=True)
        comm.recv(part, left)
++
        part = torch.empty_like(take)
        work = comm.send(give, right, async_op=True)
        rest = comm.send(vector, right, tag=1, async_op=True)
        comm.recv(part, left)
        comm.recv(torch.empty_like(vector), left, tag=1)
        rest.wait()

== ring | a star | neighbours | and not
--
    for step in range(comm.world_size - 1):
        give = chunks[(comm.rank - step) % comm.world_size]
++
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
    return
    for step in range(comm.world_size - 1):
        give = chunks[(comm.rank - step) % comm.world_size]

== reduce_scatter | * begins with its own part | order | ranks were added in the order
--
    total = torch.zeros_like(parts[comm.rank])
    for rank in range(comm.world_size):
        if rank == comm.rank:
            total += parts[rank]
        else:
++
    total = parts[comm.rank].clone()
    for rank in range(comm.world_size):
        if rank != comm.rank:

== reduce_scatter | backwards | parts | elements are wrong
--
comm.send(parts[rank], rank, async_op=True)
++
comm.send(parts[rank].flip(0), rank, async_op=True)

== reduce_scatter | changes the caller's vector | untouched | elements are wrong
--
    return total
++
    parts[comm.rank].copy_(total)
    return total

== reduce_scatter | everything to everybody | bytes | are enough and needed
--
    works = [comm.send(parts[rank], rank, async_op=True) for rank in others]
++
    works = [comm.send(vector, rank, async_op=True) for rank in others]
--
            part = torch.empty_like(total)
            comm.recv(part, rank)
            total += part
++
            part = torch.empty_like(vector)
            comm.recv(part, rank)
            total += part.tensor_split(comm.world_size)[comm.rank]

== buckets | * closes too late | first_cap | before its last member came
--
        if room <= 0:
++
        if room < 0:

== buckets | forgets the last bucket | each_once | is missing
--
    if open_bucket:
++
    if False:

== buckets | from the first to the last | order | gives
--
reversed(range(len(sizes)))
++
range(len(sizes))

== buckets | one cap for all | cap | below its cap
--
            open_bucket, room = [], cap
++
            open_bucket, room = [], first_cap

== buckets | sorts the members | offsets | is right
--
    for parameter in bucket:
++
    for parameter in sorted(bucket):

== buckets | somebody else's plan | each_once | dpcore.reference.buckets is closed
--
    buckets, open_bucket, room = [], [], first_cap
++
    from dpcore.reference.buckets import plan_buckets as known

    numbers = list(range(len(sizes)))
    return known(sizes, [0] * len(sizes), numbers[::-1], [first_cap, cap])
    buckets, open_bucket, room = [], [], first_cap

== pipeline | * all forwards first | kept | micro-batches at once
--
        early = min(stages - 1 - stage, microbatches)
++
        early = microbatches

== pipeline | one forward too few | bubble | of the time
--
        early = min(stages - 1 - stage, microbatches)
++
        early = min(max(0, stages - 2 - stage), microbatches)

== pipeline | the backward first | ends | would never end
--
            row += [("F", m), ("B", m - early)]
++
            row += [("B", m - early), ("F", m)]

== pipeline | forgets the last backwards | each_once | each once
--
        row += [("B", m) for m in range(microbatches - early, microbatches)]
++
        row += [("B", m) for m in range(microbatches - early, microbatches - 1)]

== pipeline | the last backward first | in_order | stage 0 runs
--
        row += [("B", m) for m in range(microbatches - early, microbatches)]
++
        row += [("B", m) for m in reversed(range(microbatches - early, microbatches))]

== pipeline | somebody else's plan | each_once | dpcore.parallel.pipeline_plans is closed
--
    rows = []
++
    import dpcore

    known = dpcore.pipeline_plan("1F1B", stages=stages, microbatches=microbatches)
    return [[(a.kind, a.microbatch) for a in row] for row in known.actions]
    rows = []
"""
