"""Data parallel training in four steps, each a few lines more than the last.

``NaiveDDP``        after backward, one all-reduce per parameter
``FlatDDP``         after backward, one all-reduce of everything
``PerParameterDDP`` one per parameter, as soon as its gradient is there
``BucketedDDP``     gradients travel together, and while backward goes on

All take a module and a communicator: anything with ``rank``, ``world_size``, ``broadcast(tensor,
root)`` and ``all_reduce(tensor, op, async_op=...)``. What they leave out (unused parameters, mixed
dtypes, accumulation in the middle of a bucket, buckets in the order of arrival) is what makes
``dpcore.DataParallel`` longer.

torch is imported by whoever has a module already: nothing here needs it by name, so that this can
be read, and shown, without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dpcore.reference.buckets import plan_buckets


class NaiveDDP:
    """Waits for all of backward, then reduces gradient by gradient. Call ``finish()`` between
    ``backward()`` and ``optimizer.step()``."""

    def __init__(self, module: Any, comm: Any) -> None:
        self.module, self.comm = module, comm
        self.parameters_to_train = [p for p in module.parameters() if p.requires_grad]
        self.averages = True
        for tensor in [*module.parameters(), *module.buffers()]:
            comm.broadcast(tensor.data, 0)
        self.prepare()

    def prepare(self) -> None:
        """What a step of the ladder sets up once."""

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        for buffer in self.module.buffers():
            self.comm.broadcast(buffer, 0)
        return self.module(*inputs, **kwargs)

    def parameters(self) -> Iterator[Any]:
        return iter(self.module.parameters())

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients within are only added up."""
        before, self.averages = self.averages, False
        try:
            yield
        finally:
            self.averages = before

    def finish(self) -> None:
        for parameter in self.parameters_to_train:
            self.comm.all_reduce(parameter.grad, "mean")


class FlatDDP(NaiveDDP):
    """One message: the latency of an operation is paid once. Two copies more, and still nothing
    moves before backward is over."""

    def finish(self) -> None:
        gradients = [parameter.grad for parameter in self.parameters_to_train]
        flat = gradients[0].new_empty(sum(gradient.numel() for gradient in gradients))
        parts = flat.split([gradient.numel() for gradient in gradients])
        for part, gradient in zip(parts, gradients, strict=True):
            part.copy_(gradient.reshape(-1))
        self.comm.all_reduce(flat, "mean")
        for part, gradient in zip(parts, gradients, strict=True):
            gradient.copy_(part.view(gradient.shape))


class PerParameterDDP(NaiveDDP):
    """Starts as soon as a gradient is there and overlaps with the rest of backward. Pays for an
    operation per parameter, which is too much for small ones.

    Ranks must start the same operations in the same order; with one graph on all ranks, autograd
    goes through it in the same order everywhere."""

    def prepare(self) -> None:
        self.works: list[Any] = []
        for parameter in self.parameters_to_train:
            parameter.register_post_accumulate_grad_hook(self.gradient_ready)

    def gradient_ready(self, parameter: Any) -> None:
        if self.averages:
            self.works.append(self.comm.all_reduce(parameter.grad, "mean", async_op=True))

    def finish(self) -> None:
        for work in self.works:
            work.wait()
        self.works.clear()


class BucketedDDP(PerParameterDDP):
    """Gradients fill buckets from the last layer to the first; a full one is sent. Few operations
    and overlap, for a copy into the bucket and one out of it."""

    def __init__(self, module: Any, comm: Any, bucket_cap_mb: float = 25.0) -> None:
        self.cap_bytes = int(bucket_cap_mb * 2**20)
        super().__init__(module, comm)

    def prepare(self) -> None:
        sizes = [p.numel() * p.element_size() for p in self.parameters_to_train]
        order = list(reversed(range(len(sizes))))
        self.plan = plan_buckets(sizes, [0] * len(sizes), order, [self.cap_bytes])
        self.arrived: set[int] = set()
        self.launched = 0  # buckets are sent by number, whatever order they fill up in
        self.flats: list[Any] = []
        super().prepare()

    def gradient_ready(self, parameter: Any) -> None:
        if not self.averages:
            return
        self.arrived.add(id(parameter))
        while self.launched < len(self.plan) and self.is_full(self.plan[self.launched]):
            members = [self.parameters_to_train[i].grad for i in self.plan[self.launched]]
            flat = members[0].new_empty(sum(gradient.numel() for gradient in members))
            parts = flat.split([gradient.numel() for gradient in members])
            for part, gradient in zip(parts, members, strict=True):
                part.copy_(gradient.reshape(-1))
            self.works.append(self.comm.all_reduce(flat, "mean", async_op=True))
            self.flats.append((members, parts))
            self.launched += 1

    def is_full(self, bucket: list[int]) -> bool:
        return all(id(self.parameters_to_train[i]) in self.arrived for i in bucket)

    def finish(self) -> None:
        super().finish()
        for members, parts in self.flats:
            for gradient, part in zip(members, parts, strict=True):
                gradient.copy_(part.view(gradient.shape))
        self.flats.clear()
        self.arrived.clear()
        self.launched = 0


LADDER = (NaiveDDP, FlatDDP, PerParameterDDP, BucketedDDP)
