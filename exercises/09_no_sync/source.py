"""Accumulation without communication (25 minutes)

A batch that does not fit into memory is cut into micro-batches: backward runs for each, gradients
add up in ``.grad``, and the optimizer steps after the last. Averaging them after every micro-batch
would be right, but wasteful: the mean of sums is the sum of means, so once, after the last, is
enough.

    with model.no_sync():              # nothing is sent in here
        loss(model(x0)).backward()
        loss(model(x1)).backward()
    loss(model(x2)).backward()         # what all three have added up is averaged
    model.finish()

You are given exercise 6 and write the context manager, and what the hook looks at. It must also
work when the block is left by an error, and when one block lies in another: communication begins
again only after the outermost.
"""

from contextlib import contextmanager


class AccumulatingDDP:
    """A module whose gradients are averaged while backward goes on, but not within no_sync()."""

    def __init__(self, module, comm):
        self.module, self.comm = module, comm
        self.works = []
        self.is_synchronised = True
        for tensor in [*module.parameters(), *module.buffers()]:
            comm.broadcast(tensor.data, 0)
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.gradient_ready)

    def __call__(self, *inputs):
        return self.module(*inputs)

    def gradient_ready(self, parameter):
        """Called by autograd when ``parameter.grad`` has what this backward adds to it."""
        #: solution
        if self.is_synchronised:
            self.works.append(self.comm.all_reduce(parameter.grad, "mean", async_op=True))
        #: instead
        #| self.works.append(self.comm.all_reduce(parameter.grad, "mean", async_op=True))
        #: end

    @contextmanager
    def no_sync(self):
        """Within, gradients only add up on this rank."""
        #: solution
        before, self.is_synchronised = self.is_synchronised, False
        try:
            yield
        finally:
            self.is_synchronised = before
        #: instead
        #| raise NotImplementedError("what is different within the block, and after it?")
        #| yield
        #: end

    def finish(self):
        """Called between the last backward and the optimizer: gradients are means from here on."""
        for work in self.works:
            work.wait()
        self.works.clear()


#: hint
#| A flag that the hook looks at: `self.is_synchronised`. What stands before the `yield` of a
#| context manager is its beginning, what comes after it is its end.
#: hint
#| An error in the block is raised at the `yield`: what has to happen all the same belongs into a
#| `finally`.
#: hint
#| In a block within a block, the inner end must not switch communication on: remember what the flag
#| was, and bring that back.
#: end
