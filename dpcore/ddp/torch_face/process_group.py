"""A dpcore group in the form of torch's process group, for communication hooks and ``join``.

It has only the operations that they call: all_reduce, broadcast, all_gather, barrier. Each is
complete when the call returns, so its future has a value at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from dpcore.comm.communicators.protocol import GradientGroup
from dpcore.comm.communicators.read_back import numbers_in
from dpcore.errors import Unsupported

_OPERATORS = (
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.AVG, "mean"),
    (dist.ReduceOp.PRODUCT, "prod"),
    (dist.ReduceOp.MIN, "min"),
    (dist.ReduceOp.MAX, "max"),
)


class _Done(dist.Work):
    """A completed operation. Its value is a list, as in torch's groups."""

    def __init__(self, value: Sequence[Any]) -> None:
        super().__init__()
        self._value = list(value)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def result(self) -> list[Any]:
        return self._value

    def get_future(self) -> torch.futures.Future[Any]:
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._value)
        return future


class GroupForTorch(dist.ProcessGroup):
    """Passes ``dist.all_reduce(tensor, group=this)`` and the like to a dpcore group."""

    def __init__(self, group: GradientGroup, device: torch.device) -> None:
        super().__init__(group.rank, group.world_size)  # type: ignore[call-arg]
        self._group = group
        self._device = device  # of the tensors that the group takes

    def getBackendName(self) -> str:  # noqa: N802
        return "dpcore"

    def allreduce(  # type: ignore[override]
        self, tensors: Any, options: Any = None
    ) -> _Done:
        wanted = getattr(options, "reduceOp", options) or dist.ReduceOp.SUM
        operator = next((name for known, name in _OPERATORS if wanted == known), None)
        if operator is None:
            raise Unsupported(f"all_reduce of a wrapped model's group: no operator {wanted}")
        reduce = partial(self._group.all_reduce, op=operator, async_op=False)
        return _on_each(tensors, reduce)

    def broadcast(  # type: ignore[override]
        self, tensors: Any, options: Any = None
    ) -> _Done:
        root = 0 if options is None else getattr(options, "rootRank", options)
        return _on_each(tensors, partial(self._group.broadcast, root=root))

    def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> _Done:
        inputs = _listed(inputs)
        lists = [outputs] if isinstance(outputs[0], torch.Tensor) else outputs
        gathered = []
        for parts, own in zip(lists, inputs, strict=True):
            flat = torch.empty(
                own.numel() * self._group.world_size, dtype=own.dtype, device=own.device
            )
            self._group.all_gather(flat, own.contiguous().reshape(-1))
            together = flat.view(self._group.world_size, *own.shape)
            for part, value in zip(parts, together, strict=True):
                part.copy_(value)
            gathered.append(together)
        return _Done(gathered)  # nested as in NCCL's group, since hooks index it

    def barrier(self, options: Any = None) -> _Done:
        mark = torch.zeros(1, device=self._device)
        self._group.all_reduce(mark, "sum", async_op=False)
        numbers_in(mark, self._group)  # makes the host wait, too
        return _Done([])


def _on_each(tensors: Any, run: Callable[[torch.Tensor], Any]) -> _Done:
    """Runs an operation in place on each tensor; for a non-contiguous one, on a copy."""
    tensors = _listed(tensors)
    for tensor in tensors:
        flat = tensor.contiguous()
        run(flat)
        if flat is not tensor:
            tensor.copy_(flat)
    return _Done(tensors)


def _listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
