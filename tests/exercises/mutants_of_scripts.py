"""More of the exercises that are scripts or plans; mutants.py says how to read it."""

TEXT = """
== refactoring | another noise on each rank, and alone | alone | are right
~ manual_seed(SEED + comm.rank) => manual_seed(SEED + comm.rank + 1)

== refactoring | noise by the number of ranks | noise | both ranks add the same noise
~ manual_seed(SEED + comm.rank) => manual_seed(SEED * comm.world_size)

== refactoring | a batch of all ranks for each | batch | steps of [
~ BATCH // comm.world_size => BATCH * comm.world_size

== refactoring | halves without the rest | test_shares | tests in 3 epochs
--
range(comm.rank, len(test_set), comm.world_size)
++
range(len(test_set))[comm.rank :: comm.world_size][: len(test_set) // comm.world_size]

== refactoring | every rank tests everything | test_shares | tests in 3 epochs
~     tests = DataLoader(mine, BATCH) =>     tests = DataLoader(test_set, BATCH)

== refactoring | tests whole batches only | test_shares | tests in 3 epochs
~ DataLoader(mine, BATCH) => DataLoader(mine, BATCH, drop_last=True)

== refactoring | always epoch 0 | set_epoch | the same order
~ sampler.set_epoch(epoch) => sampler.set_epoch(0)

== refactoring | rank 0 alone sets the epoch | shares | samples are used
~         sampler.set_epoch(epoch) =>         sampler.set_epoch(epoch * (comm.rank == 0))

== refactoring | the sum of losses | losses | and the mean of
~ all_reduce(mean_loss, "mean") => all_reduce(mean_loss, "sum")

== refactoring | the loss of the last batch | losses | and the mean of
~             total += loss.detach() =>             total = len(batches) * loss.detach().reshape(1)

== refactoring | a mean of two ranks for any | alone | are right
~         comm.all_reduce(mean_loss, "mean") =>         comm.all_reduce(mean_loss); mean_loss /= 2

== refactoring | divides by its own share | accuracies | 1.8158 is the best that was reported
~ correct.item() / len(test_set) => correct.item() / len(mine)

== refactoring | the accuracy of rank 0 | accuracies | 0.9600 is the best that was reported
--
        comm.all_reduce(correct, "sum")
++
        correct *= comm.world_size
        comm.broadcast(correct, 0)

== refactoring | the barrier of one rank | reads_later | PeerLost
~     comm.barrier() =>     if comm.rank == 0: comm.barrier()

== refactoring | a barrier before it is written | reads_later | the model that rank 1 has read
~     comm.barrier() =>
--
    losses, accuracies = [], []
++
    comm.barrier()
    losses, accuracies = [], []

== refactoring | one rank reads | reads_later | that is not the file's
~     load(model, path) =>     if comm.rank == 0: load(model, path)

== refactoring | the other rank writes | one_writes | 2 ranks write [0, 3] times
~             if is_best: =>         if is_best and comm.rank == comm.world_size - 1:
~                 save(model, path) =>             save(model, path)

== refactoring | writes the last model | best | rank 0 writes 8 times in 8 epochs
~             if is_best: =>             if True:

== refactoring | the same order for all epochs and ranks | shares | 96 samples are used again
~ train_set, comm.world_size, comm.rank, shuffle=True => train_set, comm.world_size, 0, shuffle=True

== assessment | always epoch 0 | order | the same order in epochs 0 and 1
~ sampler.set_epoch(epoch) => sampler.set_epoch(0)

== assessment | no shuffle | order | the same order in epochs 0 and 1
~ shuffle=True, seed=seed) => shuffle=False)

== assessment | the gradients of rank 0 only | both_count | whatever the samples
--
    wrapped = dpcore.DataParallel(model)
++
    wrapped = model
    for parameter in model.parameters():
        comm.broadcast(parameter.detach(), 0)
--
            optimizer.step()
++
            for parameter in model.parameters():
                comm.broadcast(parameter.grad, 0)
            optimizer.step()

== assessment | the parameters of rank 0 after each step | both_count | whatever the samples
--
    wrapped = dpcore.DataParallel(model)
++
    wrapped = model
    for parameter in model.parameters():
        comm.broadcast(parameter.detach(), 0)
--
            optimizer.step()
++
            optimizer.step()
            for parameter in model.parameters():
                comm.broadcast(parameter.detach(), 0)

== assessment | every second batch | samples | rank 0 uses 256 of 1024
~         for x, y in batches: =>         for x, y in list(batches)[::2]:

== assessment | a batch of everything | accuracy | asked for in two epochs running
~ DataLoader(train_set, BATCH, => DataLoader(train_set, len(train_set),

== assessment | never steps | accuracy | asked for in two epochs running
~             optimizer.step() =>             pass

== assessment | rank 1 ends an epoch early | samples | rank 0
~ range(epochs) => range(epochs - comm.rank)

== assessment | steps in the wrong place | accuracy | asked for in two epochs running
--
            loss.backward()
            optimizer.step()
++
            loss.backward()
        optimizer.step()

== assessment | trains what the model was before | accuracy | asked for in two epochs running
--
    wrapped = dpcore.DataParallel(model)
++
    import copy
    wrapped = dpcore.DataParallel(copy.deepcopy(model))

== pipeline | one forward too many | kept | micro-batches at once
~ early = min(stages - 1 - stage, microbatches) => early = min(stages - stage, microbatches)

== pipeline | as many early forwards on every stage | kept | micro-batches at once
~ early = min(stages - 1 - stage, microbatches) => early = min(stages - 1, microbatches)

== pipeline | more stages than micro-batches | each_once | each once
~ early = min(stages - 1 - stage, microbatches) => early = stages - 1 - stage

== pipeline | the first stage is the last | ends | would never end
~ early = min(stages - 1 - stage, microbatches) => early = min(stage, microbatches)

== pipeline | one micro-batch after the other | bubble | of the time
~ early = min(stages - 1 - stage, microbatches) => early = 0

== pipeline | counts from 1 | each_once | each once
~ [("F", m) for m in range(early)] => [("F", m + 1) for m in range(early)]

== pipeline | small letters | each_once | not a list of lists of passes
~ ("F", m) => ("f", m)

== pipeline | texts | each_once | not a list of lists of passes
~     return rows =>     return [[f"{kind}{m}" for kind, m in row] for row in rows]

== pipeline | no last stage | each_once | lists for
~ range(stages) => range(stages - 1)

== pipeline | the backward of the same micro-batch | each_once | each once
~ ("B", m - early)] => ("B", m)]

== pipeline | two forwards, then two backwards | turns | come first, then
--
        for m in range(early, microbatches):
            row += [("F", m), ("B", m - early)]
++
        for m in range(early, microbatches):
            row += [("F", m), ("B", m - early)]
        if stage == 0 and len(row) > 4 and early:
            at = row.index(("B", 0))
            row[at - 1], row[at] = row[at], row[at - 1]

== pipeline | all forwards where there are few | kept | micro-batches at once
--
early = min(stages - 1 - stage, microbatches)
++
early = microbatches if microbatches < 4 else min(stages - 1 - stage, microbatches)

== pipeline | a stage the wrong way round | turns | 4 forwards come first
--
        rows.append(row)
++
        rows.append(row if stage or stages < 5 else sorted(row, key=lambda p: p[0] == "B"))
"""
