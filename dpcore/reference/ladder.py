"""Data parallel training in four steps, each a few lines more than the last.

``NaiveDDP``        after backward, one all-reduce per parameter
``FlatDDP``         after backward, one all-reduce of everything
``PerParameterDDP`` one per parameter, as soon as its gradient is ready
``BucketedDDP``     one per bucket of gradients, while backward runs

All take a module and a communicator: anything with ``rank``, ``world_size``, ``broadcast(tensor,
root)`` and ``all_reduce(tensor, op, async_op=...)``. What they leave out (unused parameters, mixed
dtypes, accumulation in the middle of a bucket, buckets in the order of arrival) is what makes
``dpcore.DataParallel`` longer.

This file does not import torch, so it can be read and shown without it: it only uses the module
and tensors that the caller passes.
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
        """Sets up what a class needs once. Subclasses override it."""

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        for buffer in self.module.buffers():
            self.comm.broadcast(buffer, 0)
        return self.module(*inputs, **kwargs)

    def parameters(self) -> Iterator[Any]:
        return iter(self.module.parameters())

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients in this block are only summed."""
        before, self.averages = self.averages, False
        try:
            yield
        finally:
            self.averages = before

    def finish(self) -> None:
        for parameter in self.parameters_to_train:
            self.comm.all_reduce(parameter.grad, "mean")


class FlatDDP(NaiveDDP):
    """One message, so the latency of an operation is paid once. It needs two more copies, and
    still sends nothing before backward has ended."""

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
    """Sends each gradient as soon as it is ready, which overlaps with the rest of backward. An
    operation per parameter costs too much for small parameters.

    Ranks must start the same operations in the same order. If all ranks have the same graph,
    autograd visits it in the same order everywhere."""

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
    """Gradients fill buckets from the last layer to the first, and a full bucket is sent. It has
    few operations and overlap, at the cost of a copy into the bucket and one out of it."""

    def __init__(self, module: Any, comm: Any, bucket_cap_mb: float = 25.0) -> None:
        self.cap_bytes = int(bucket_cap_mb * 2**20)
        super().__init__(module, comm)

    def prepare(self) -> None:
        sizes = [p.numel() * p.element_size() for p in self.parameters_to_train]
        order = list(reversed(range(len(sizes))))
        self.plan = plan_buckets(sizes, [0] * len(sizes), order, [self.cap_bytes])
        self.arrived: set[int] = set()
        self.launched = 0  # buckets are sent by number, even if they fill in another order
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
