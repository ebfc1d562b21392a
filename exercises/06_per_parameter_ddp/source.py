"""Communication while computing (30 minutes)

Backward computes the gradients of the last layer first. They are final then, and could be on their
way while the layers before are still computed. Autograd tells you when: a hook that is registered
with ``parameter.register_post_accumulate_grad_hook(hook)`` is called as ``hook(parameter)`` as soon
as ``parameter.grad`` is there.

    work = comm.all_reduce(tensor, "mean", async_op=True)   begins an operation, returns at once
    work.wait()                                             returns when the tensor is the mean

A hook that waits for its operation would hold up backward. All waiting is for ``finish``.

Ranks must begin the same operations in the same order. With the same model on all ranks, autograd
calls the hooks in the same order everywhere. docs/learn/4-per-gradient.md shows what is won, and
docs/learn/6-exposed.md how it is measured.
"""


class PerParameterDDP:
    """A module whose gradients are averaged while backward goes on, each by itself."""

    def __init__(self, module, comm):
        self.module, self.comm = module, comm
        self.works = []  # what finish() has to wait for
        for tensor in [*module.parameters(), *module.buffers()]:
            comm.broadcast(tensor.data, 0)
        #: solution
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.gradient_ready)
        #: instead
        #| raise NotImplementedError("register self.gradient_ready for what is trained")
        #: end

    def __call__(self, *inputs):
        return self.module(*inputs)

    def gradient_ready(self, parameter):
        """Called by autograd when ``parameter.grad`` is final."""
        #: solution
        work = self.comm.all_reduce(parameter.grad, "mean", async_op=True)
        self.works.append(work)
        #: instead
        #| raise NotImplementedError("begin to average it")
        #: end

    def finish(self):
        """Called between backward and the optimizer: from here on, gradients are means."""
        #: solution
        for work in self.works:
            work.wait()
        self.works.clear()
        #: instead
        #| raise NotImplementedError("wait for what is in flight")
        #: end


#: hint
#| A parameter that is not trained has no gradient and takes no hook: `if parameter.requires_grad`.
#: hint
#| `gradient_ready` begins the operation and keeps what it returned; it does not wait.
#: hint
#| `finish` waits for all of `self.works`, and empties the list for the next step.
#: end
