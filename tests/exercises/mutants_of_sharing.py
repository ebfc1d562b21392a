"""More of the exercises about what ranks share; mutants.py says how to read it."""

TEXT = """
== zero1 | own gradients only | first_step | step 1
--
        self.comm.reduce_scatter(gradient, gradients, "mean")
++
        gradient.copy_(gradients.chunk(self.comm.world_size)[self.comm.rank])

== zero1 | divides once more | first_step | as steps from where they began, they are half of
--
        self.velocity.mul_(self.momentum).add_(gradient)
++
        self.velocity.mul_(self.momentum).add_(gradient / self.comm.world_size)

== zero1 | two ranks only | three | step 1
~ (gradient, gradients, "mean") => (gradient, gradients.div_(2), "sum")

== zero1 | the velocity before the step | first_step | what they were before
--
        self.velocity.mul_(self.momentum).add_(gradient)
        mine.sub_(self.velocity, alpha=self.lr)
++
        mine.sub_(self.velocity, alpha=self.lr)
        self.velocity.mul_(self.momentum).add_(gradient)

== zero1 | damps the gradient | first_step | as steps from where they began, they are 0.1 times
~ .add_(gradient) => .add_(gradient, alpha=1 - self.momentum)

== zero1 | Nesterov's momentum | first_step | step 1
--
mine.sub_(self.velocity, alpha=self.lr)
++
mine.sub_(gradient + self.momentum * self.velocity, alpha=self.lr)

== zero1 | a step up | first_step | as steps from where they began, they are minus the right ones
~ mine.sub_(self.velocity => mine.add_(self.velocity

== zero1 | the part of another rank | first_step | step 1
--
values.chunk(self.comm.world_size)[self.comm.rank].clone()
++
values.chunk(self.comm.world_size)[-1 - self.comm.rank].clone()

== zero1 | begins and never waits | first_step | not a number
~ self.comm.all_gather(values, mine) => self.comm.all_gather(values, mine, async_op=True)

== zero1 | waits for the last operation only | first_step | not a number
--
self.comm.reduce_scatter(gradient, gradients, "mean")
++
self.comm.reduce_scatter(gradient, gradients, "mean", async_op=True)

== zero1 | gathers gradients | first_step | step 1
~ self.comm.all_gather(values, mine) => self.comm.all_gather(values, gradient)

== zero1 | the whole state in the module | state | keeps 436 elements
--
        self.velocity = self.parameters[0].detach().new_zeros(self.part)
++
        WHOLE.append(self.parameters[0].detach().new_zeros(self.part * comm.world_size))
        self.velocity = WHOLE[-1].chunk(comm.world_size)[comm.rank]
--
class Zero1:
++
WHOLE = []


class Zero1:

== zero1 | single precision | first_step | step 1
~ self.parameters[0].detach().new_zeros(self.part) => torch.zeros(self.part)

== zero1 | a broadcast for each rank | operations | it runs reduce_scatter
--
        self.comm.all_gather(values, mine)
++
        for rank, part in enumerate(values.chunk(self.comm.world_size)):
            part.copy_(mine if rank == self.comm.rank else part)
            self.comm.broadcast(part, rank)

== zero1 | averages parameters as well | operations | it runs reduce_scatter
--
        self.comm.all_gather(values, mine)
++
        self.comm.all_gather(values, mine)
        self.comm.all_reduce(values, "mean")

== local_sgd | * all batches at once | streams | batches more than it has used
~     for x, y in batches: =>     for x, y in list(batches):

== local_sgd | two ranks only | more | elements are wrong
--
            comm.all_reduce(parameter.data, "mean")
++
            comm.all_reduce(parameter.data)
            parameter.data /= 2

== local_sgd | the values of rank 0 instead of the mean | each_step | elements are wrong
--
            comm.all_reduce(parameter.data, "mean")
++
            comm.broadcast(parameter.data, 0)

== local_sgd | sums | each_step | elements are wrong
~ comm.all_reduce(parameter.data, "mean") => comm.all_reduce(parameter.data)

== local_sgd | averages, then divides | each_step | elements are wrong
--
comm.all_reduce(parameter.data, "mean")
++
comm.all_reduce(parameter.data, "mean"); parameter.data /= comm.world_size

== local_sgd | averages what is not trained, too | bytes | 10512 bytes
--
        if parameter.requires_grad:
            comm.all_reduce(parameter.data, "mean")
++
        comm.all_reduce(parameter.data, "mean")

== local_sgd | averages buffers, too | bytes | 10512 bytes
--
    for parameter in module.parameters():
++
    for parameter in [*module.buffers(), *module.parameters()]:
--
        if parameter.requires_grad:
++
        if parameter.requires_grad or not isinstance(parameter, torch.nn.Parameter):

== local_sgd | each average twice | bytes | bytes, and 3 averages
--
            average(comm, module)
            local_steps = 0
++
            average(comm, module)
            average(comm, module)
            local_steps = 0

== local_sgd | begins and never waits | each_step | not a number
~ comm.all_reduce(parameter.data, "mean") => comm.all_reduce(parameter.data, "mean", async_op=True)

== local_sgd | waits for the last parameter only | each_step | not a number
--
            comm.all_reduce(parameter.data, "mean")
++
            work = comm.all_reduce(parameter.data, "mean", async_op=True)
    work.wait()

== local_sgd | never begins to count anew | each_step | elements are wrong
--
            average(comm, module)
            local_steps = 0
++
            average(comm, module)

== local_sgd | after the first average, in each step | quiet | bytes were sent after step
~         if local_steps == sync_every: =>         if local_steps >= sync_every:
--
            average(comm, module)
            local_steps = 0
++
            average(comm, module)

== local_sgd | every rank is a root | each_step | raised Mismatch
~ comm.broadcast(tensor.data, 0) => comm.broadcast(tensor.data, comm.rank)

== local_sgd | only rank 0 averages | each_step | Mismatch
~         if parameter.requires_grad: =>         if parameter.requires_grad and comm.rank == 0:

== local_sgd | in single precision | each_step | was a type of 32 bits
--
            comm.all_reduce(parameter.data, "mean")
++
            values = parameter.data.float()
            comm.all_reduce(values, "mean")
            parameter.data.copy_(values)

== tensor_parallel | columns in turns | forward | elements are wrong
--
self.up, self.up_bias = up[:, mine].clone(),
++
self.up, self.up_bias = up[:, comm.rank :: comm.world_size].clone(),

== tensor_parallel | rows of the rank after | forward | elements are wrong
--
self.down, self.down_bias = down[mine].clone(),
++
self.down, self.down_bias = down.roll(size, 0)[mine].clone(),

== tensor_parallel | no relu | forward | elements are wrong
~ torch.relu(x @ self.up + self.up_bias) => (x @ self.up + self.up_bias)

== tensor_parallel | forgets the last bias | forward | without down_bias
~         return y + self.down_bias =>         return y

== tensor_parallel | two ranks only | parts | keeps 58 elements
~ size = len(up_bias) // comm.world_size => size = len(up_bias) // min(2, comm.world_size)

== tensor_parallel | begins and never waits | forward | not a number
~         self.comm.all_reduce(y) =>         self.comm.all_reduce(y, async_op=True)

== tensor_parallel | backward begins and never waits | dx | not a number
~         self.comm.all_reduce(dx) =>         self.comm.all_reduce(dx, async_op=True)

== tensor_parallel | the mean of dx | dx | they are the means over 2 ranks
~ self.comm.all_reduce(dx) => self.comm.all_reduce(dx, "mean")

== tensor_parallel | dx without the mask | dx | elements are wrong
~         dx = inner @ self.up.T =>         dx = dy @ self.down.T @ self.up.T

== tensor_parallel | the bias counts for each rank | gradients | are 2 times the right ones
~ dy.sum(0)] => dy.sum(0) * self.comm.world_size]

== tensor_parallel | the mean over tokens | gradients | times the right ones
~ inner.sum(0), => inner.mean(0),

== tensor_parallel | keeps the first x | again | elements are wrong
~         self.x = x =>         self.x = getattr(self, "x", x)

== tensor_parallel | gradients add up | again | added to those of the first time
--
        dx = inner @ self.up.T
++
        before = getattr(self, "sums", [0] * 4)
        self.gradients = self.sums = [a + b for a, b in zip(before, self.gradients)]
        dx = inner @ self.up.T

== tensor_parallel | changes x | dy | x was changed
~         self.features = =>         x.clamp_(min=-1.0); self.features =

== tensor_parallel | whole matrices in the class | parts | keeps 154 elements
~         self.comm = comm =>         self.comm = comm; TwoMatrices.whole = up, down

== tensor_parallel | single precision | forward | was a type of 32 bits
--
        y = self.features @ self.down
++
        y = (self.features.float() @ self.down.float()).double()

== tensor_parallel | gradients in another order | gradients | the shape is
--
self.gradients = [self.x.T @ inner, inner.sum(0), self.features.T @ dy, dy.sum(0)]
++
self.gradients = [self.features.T @ dy, dy.sum(0), self.x.T @ inner, inner.sum(0)]
"""
