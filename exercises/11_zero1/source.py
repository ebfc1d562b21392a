"""ZeRO, stage 1 (45 minutes)

In data parallel training every rank keeps the whole state of the optimizer: for momentum as much
memory as the model, for Adam twice that. And all compute the same step. ZeRO divides it: rank r
keeps the state of part r of the parameters only, updates only that part, and all exchange the
parts. An all-reduce is a reduce-scatter and an all-gather anyway; the step happens in between.

    reduce-scatter   rank r gets the mean of part r of all gradients
    step             rank r updates part r of the parameters
    all-gather       everybody gets all parts

    comm.reduce_scatter(output, input, "mean")   rank r's output is part r of the mean of all inputs
    comm.all_gather(output, input)               all inputs one after the other, on every rank

All parts have the same size, so the flat tensors have some elements more at the end where the
number of parameters is not a multiple of the ranks. Momentum as torch.optim.SGD has it:

    velocity = momentum * velocity + gradient
    parameter = parameter - lr * velocity
"""

import torch


class Zero1:
    """SGD with momentum whose state is divided among the ranks."""

    def __init__(self, parameters, comm, lr, momentum):
        self.parameters, self.comm = list(parameters), comm
        self.lr, self.momentum = lr, momentum
        self.sizes = [parameter.numel() for parameter in self.parameters]
        self.part = -(-sum(self.sizes) // comm.world_size)  # elements of a rank, rounded up
        #: solution
        self.velocity = self.parameters[0].detach().new_zeros(self.part)
        #: instead
        #| raise NotImplementedError("the state of this rank's part, and no more")
        #: end

    def flat(self, tensors):
        """All tensors one after the other, and zeros up to world_size * part elements."""
        flat = tensors[0].new_zeros(self.part * self.comm.world_size)
        places = flat[: sum(self.sizes)].split(self.sizes)
        for place, tensor in zip(places, tensors, strict=True):
            place.copy_(tensor.flatten())
        return flat

    @torch.no_grad()
    def step(self):
        """The gradients of each rank are its own: they were not averaged."""
        gradients = self.flat([parameter.grad for parameter in self.parameters])
        values = self.flat([parameter.data for parameter in self.parameters])
        #: solution
        mine = values.chunk(self.comm.world_size)[self.comm.rank].clone()
        gradient = torch.empty_like(mine)
        self.comm.reduce_scatter(gradient, gradients, "mean")
        self.velocity.mul_(self.momentum).add_(gradient)
        mine.sub_(self.velocity, alpha=self.lr)
        self.comm.all_gather(values, mine)
        #: instead
        #| raise NotImplementedError("reduce-scatter, step, all-gather: values is the new model")
        #: end
        places = values[: sum(self.sizes)].split(self.sizes)
        for parameter, place in zip(self.parameters, places, strict=True):
            parameter.copy_(place.view_as(parameter))


#: hint
#| The state is one tensor of `self.part` elements: `parameter.new_zeros(self.part)` has the right
#| type.
#: hint
#| `values.chunk(world_size)[rank]` is this rank's part of the parameters. It is a view: what is
#| written to it is in `values` as well.
#: hint
#| Reduce-scatter the gradients into a tensor like your part; update velocity and part in place;
#| then all-gather the parts into `values`, which is copied back below.
#: end
