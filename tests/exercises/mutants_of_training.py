"""Of the other exercises about training; mutants.py says how to read it."""

TEXT = """
== naive_ddp | sums | gradients | they are the sums over 3 ranks, and not the means
--
parameter.grad, "mean"
++
parameter.grad, "sum"

== naive_ddp | * forgets buffers | begin | values of rank 1
--
        for tensor in [*module.parameters(), *module.buffers()]:
++
        for tensor in module.parameters():

== naive_ddp | forgets frozen parameters | begin | values of rank 1
--
            comm.broadcast(tensor.data, 0)
++
            if tensor.requires_grad or not isinstance(tensor, torch.nn.Parameter):
                comm.broadcast(tensor.data, 0)
--
class NaiveDDP:
++
import torch


class NaiveDDP:

== naive_ddp | forgets biases | gradients | still this rank's own
--
            if parameter.requires_grad:
++
            if parameter.requires_grad and parameter.dim() > 1:

== naive_ddp | averages twice | operations | 12 operations
--
                self.comm.all_reduce(parameter.grad, "mean")
++
                self.comm.all_reduce(parameter.grad, "mean")
                self.comm.all_reduce(parameter.grad, "mean")

== naive_ddp | takes the gradients of rank 0 | gradients | still this rank's own
--
self.comm.all_reduce(parameter.grad, "mean")
++
self.comm.broadcast(parameter.grad, 0)

== flat_ddp | * brings nothing back | gradients | still this rank's own
--
            gradient.copy_(part.view_as(gradient))
++
            pass

== flat_ddp | copies nothing in | gradients | step 1
--
            part.copy_(gradient.flatten())
++
            pass

== flat_ddp | one by one | operations | one all_reduce is right
--
        self.comm.all_reduce(flat, "mean")
++
        for part in parts:
            self.comm.all_reduce(part, "mean")

== per_parameter_ddp | all at the end | early | of 6 operations were sent by then
--
                parameter.register_post_accumulate_grad_hook(self.gradient_ready)
++
                pass
--
        for work in self.works:
++
        for parameter in reversed(list(self.module.parameters())):
            if parameter.requires_grad:
                self.gradient_ready(parameter)
        for work in self.works:

== per_parameter_ddp | * a hook that blocks | no_wait | is held up by all_reduce
--
        work = self.comm.all_reduce(parameter.grad, "mean", async_op=True)
        self.works.append(work)
++
        self.comm.all_reduce(parameter.grad, "mean")

== per_parameter_ddp | never waits | gradients | not a number
--
        for work in self.works:
            work.wait()
++

== per_parameter_ddp | sends a copy | gradients | still this rank's own
--
all_reduce(parameter.grad, "mean"
++
all_reduce(parameter.grad.clone(), "mean"

== no_sync | * sends within the block | silent | operations within no_sync
--
        if self.is_synchronised:
++
        if True:

== no_sync | never sends again | once | 0 operations after the block
--
            self.is_synchronised = before
++
            pass

== no_sync | forgets errors | error | 0 operations
--
        try:
            yield
        finally:
            self.is_synchronised = before
++
        yield
        self.is_synchronised = before

== no_sync | the inner end switches on | nested | operations within the outer block
--
            self.is_synchronised = before
++
            self.is_synchronised = True

== no_sync | after a block within a block, never again | nested | 0 operations after the outer block
--
        before, self.is_synchronised = self.is_synchronised, False
++
        self.before, self.is_synchronised = self.is_synchronised, False
--
            self.is_synchronised = before
++
            self.is_synchronised = self.before

== no_sync | only the last micro-batch counts | gradients | elements are wrong
--
            self.is_synchronised = before
++
            self.is_synchronised = before
            self.module.zero_grad()

== launch_schedule | all at the end | early | 0 operations were sent by then
--
        if all(control.is_complete(member) for member in pair):
            control.launch(pair)
++
--
        control.wait_for_all()
++
        for first in range(0, control.buckets, 2):
            control.launch(list(range(first, min(first + 2, control.buckets))))
        control.wait_for_all()

== launch_schedule | * one by one | pairs | operations of 1, 1, 1, 1, 1, 1 buckets
--
            control.launch(pair)
++
            for member in pair:
                control.launch(member)

== launch_schedule | pairs from the other end | odd | 1, 2, 2 buckets, and 2, 2, 1 are right
--
        first = bucket - bucket % 2
        pair = list(range(first, min(first + 2, control.buckets)))
++
        odd = control.buckets % 2
        first = max(0, bucket - (bucket - odd) % 2) if bucket >= odd else 0
        pair = list(range(first, first + (1 if bucket < odd else 2)))

== launch_schedule | waits in the event | hidden | the best step took
--
            control.launch(pair)
++
            control.launch(pair)
            control.wait(bucket)

== launch_schedule | forgets the last one | odd | rank
--
        pair = list(range(first, min(first + 2, control.buckets)))
++
        pair = [first, first + 1]
        if pair[1] == control.buckets:
            return

== zero1 | * the whole state | state | and its part has
--
new_zeros(self.part)
++
new_zeros(self.part * comm.world_size)
--
        self.velocity.mul_(self.momentum).add_(gradient)
        mine.sub_(self.velocity, alpha=self.lr)
++
        velocity = self.velocity.chunk(self.comm.world_size)[self.comm.rank]
        velocity.mul_(self.momentum).add_(gradient)
        mine.sub_(velocity, alpha=self.lr)

== zero1 | keeps a second copy | state | and its part has
--
        self.comm.all_gather(values, mine)
++
        self.comm.all_gather(values, mine)
        self.cache = {"gradients": [gradients]}

== zero1 | an all-reduce | operations | it runs all_reduce, all_gather
--
        self.comm.reduce_scatter(gradient, gradients, "mean")
++
        self.comm.all_reduce(gradients, "mean")
        gradient = gradients.chunk(self.comm.world_size)[self.comm.rank]

== zero1 | sums | first_step | what the sums of the gradients give, and not the means
--
(gradient, gradients, "mean")
++
(gradient, gradients, "sum")

== zero1 | forgets the momentum | momentum | after step 2
--
        self.velocity.mul_(self.momentum).add_(gradient)
++
        self.velocity.copy_(gradient)

== zero1 | everybody keeps to itself | first_step | elements are wrong
--
        self.comm.all_gather(values, mine)
++
        values.chunk(self.comm.world_size)[self.comm.rank].copy_(mine)

== local_sgd | an average in every step | quiet | bytes were sent after step 1
--
        if local_steps == sync_every:
++
        if True:

== local_sgd | * forgets the last steps | rest | this rank's own: the last steps are not averaged
--
    if local_steps:
        average(comm, module)
++

== local_sgd | forgets buffers | each_step | the buffer shift
--
    for tensor in [*module.parameters(), *module.buffers()]:
++
    for tensor in module.parameters():

== local_sgd | forgets frozen parameters | each_step | scale
--
        comm.broadcast(tensor.data, 0)
++
        if tensor.requires_grad or not isinstance(tensor, torch.nn.Parameter):
            comm.broadcast(tensor.data, 0)

== local_sgd | averages twice at the end | bytes | averages have
--
    if local_steps:
++
    if True:

== local_sgd | averages gradients | each_step | elements are wrong
--
            comm.all_reduce(parameter.data, "mean")
++
            comm.all_reduce(parameter.grad, "mean")

== local_sgd | begins with its own values | each_step | still those that this rank began with
--
        comm.broadcast(tensor.data, 0)
++
        pass

== local_sgd | a step too late | quiet | bytes were sent after step 5
--
        if local_steps == sync_every:
++
        if local_steps == sync_every + 1:

== refactoring | no average of gradients | gradients | bytes were all-reduced in 18 steps
--
    wrapped = dpcore.DataParallel(model)
++
    wrapped = model

== refactoring | the same noise | noise | both ranks add the same noise
--
manual_seed(SEED + comm.rank)
++
manual_seed(SEED)

== refactoring | every rank its own model | noise | the model of rank 1 at the beginning
--
    torch.manual_seed(SEED)
++
    torch.manual_seed(SEED + comm.rank)

== refactoring | everybody trains on everything | shares | samples are used again
--
        train_set, comm.world_size, comm.rank, shuffle=True
++
        train_set, 1, 0, shuffle=True

== refactoring | a larger batch | batch | samples, and not 32
--
BATCH // comm.world_size
++
BATCH

== refactoring | a sampler that fills up | test_shares | tests in 3 epochs
--
    tests = DataLoader(mine, BATCH)
++
    tests = DataLoader(
        test_set, BATCH, sampler=DistributedSampler(test_set, comm.world_size, comm.rank)
    )

== refactoring | * forgets set_epoch | set_epoch | have the same order
--
        sampler.set_epoch(epoch)
++
        pass

== refactoring | the loss of one rank | losses | and the mean of
--
        comm.all_reduce(mean_loss, "mean")
++
        pass

== refactoring | * the accuracy of one rank only | accuracies | is the best that was reported
--
        comm.all_reduce(correct, "sum")
++
        pass
--
        accuracies.append(correct.item() / len(test_set))
++
        accuracies.append(correct.item() / len(mine))

== refactoring | the mean of accuracies | accuracies | is the best that was reported
--
        comm.all_reduce(correct, "sum")
        accuracies.append(correct.item() / len(test_set))
++
        correct /= len(mine)
        comm.all_reduce(correct, "mean")
        accuracies.append(correct.item())

== refactoring | everybody writes | one_writes | ranks write
--
            if is_best:
                save(model, path)
++
        if is_best:
            save(model, path)

== refactoring | everybody prints | one_writes | ranks print
--
        if comm.rank == 0:
            print(
++
        print(
--
            if is_best:
                save(model, path)
++
        if comm.rank == 0 and is_best:
            save(model, path)

== refactoring | reads before it is written | reads_later | rank 1
--
    comm.barrier()
++

== refactoring | the last model, not the best | reads_later | that is not the file's
--
    load(model, path)
++

== refactoring | a collective on one rank | losses | rank
--
        if comm.rank == 0:
            print(
++
        if comm.rank == 0:
            comm.barrier()
            print(
"""
