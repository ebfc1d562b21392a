"""Naive DDP (20 minutes)

Data parallel training, the plain way. Every rank has the whole model and a share of each batch.
After backward, the gradients of all ranks are averaged, and every rank makes the same step.

    comm.broadcast(tensor, root)      the values of rank ``root`` on all ranks, in place
    comm.all_reduce(tensor, "mean")   the mean over all ranks, in place

Two things are yours:

* ``__init__``: ranks may come with different values. All begin with those of rank 0, buffers
  included (the running mean of a batch norm is one).
* ``finish``: called between ``backward()`` and the optimizer. From here on ``.grad`` is the mean.
  Parameters that are not trained have no gradient.

If the loss is a mean over samples, and all ranks have as many, then every step is that of one
process with the whole batch: docs/learn/1-the-mean.md.
"""


class NaiveDDP:
    """A module whose gradients are averaged after backward, one after the other."""

    def __init__(self, module, comm):
        self.module, self.comm = module, comm
        #: solution
        for tensor in [*module.parameters(), *module.buffers()]:
            comm.broadcast(tensor.data, 0)
        #: instead
        #| raise NotImplementedError("let every rank begin with the values of rank 0")
        #: end

    def __call__(self, *inputs):
        return self.module(*inputs)

    def finish(self):
        """Called between backward and the optimizer: from here on, gradients are means."""
        #: solution
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                self.comm.all_reduce(parameter.grad, "mean")
        #: instead
        #| raise NotImplementedError("average every gradient")
        #: end


#: hint
#| `module.parameters()` and `module.buffers()` go through all of them, in the same order on all
#| ranks. Autograd minds when a parameter is written to: hand over `tensor.data`.
#: hint
#| A parameter with `requires_grad=False` has `grad` None. Skip it.
#: end
