"""Flat DDP (20 minutes)

Every operation costs a latency, however small it is. The naive way pays it once for each parameter.
So copy all gradients into one flat tensor, average that, and copy the means back: one operation,
and two copies that are cheap beside it.

    flat = like.new_empty(n)         a tensor with n elements, of the same type as another
    flat.split([n0, n1, ...])        views of the flat tensor with so many elements each
    view.copy_(tensor.flatten())     copies into a view
    comm.all_reduce(flat, "mean")    the mean over all ranks, in place

``__init__`` is that of the last exercise. docs/learn/3-two-costs.md says what a message costs.
"""


class FlatDDP:
    """A module whose gradients are averaged after backward, all in one operation."""

    def __init__(self, module, comm):
        self.module, self.comm = module, comm
        for tensor in [*module.parameters(), *module.buffers()]:
            comm.broadcast(tensor.data, 0)

    def __call__(self, *inputs):
        return self.module(*inputs)

    def finish(self):
        """Called between backward and the optimizer: from here on, gradients are means."""
        gradients = [p.grad for p in self.module.parameters() if p.requires_grad]
        #: solution
        flat = gradients[0].new_empty(sum(gradient.numel() for gradient in gradients))
        parts = flat.split([gradient.numel() for gradient in gradients])
        for part, gradient in zip(parts, gradients, strict=True):
            part.copy_(gradient.flatten())
        self.comm.all_reduce(flat, "mean")
        for part, gradient in zip(parts, gradients, strict=True):
            gradient.copy_(part.view_as(gradient))
        #: instead
        #| raise NotImplementedError("one flat tensor, one operation, and back")
        #: end


#: hint
#| `sizes = [gradient.numel() for gradient in gradients]`; the flat tensor has sum(sizes) elements,
#| and `flat.split(sizes)` gives one view for each gradient.
#: hint
#| After the all-reduce the views hold the means. `gradient.copy_(part.view_as(gradient))` brings
#| one back; `parameter.grad = ...` would do as well, but others may hold the old tensor.
#: end
