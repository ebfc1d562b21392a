"""A communicator of mpi4py as a group that gradients can be averaged in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dpcore.communicators.protocol import Pending
from dpcore.communicators.torch_group import divide_in_place
from dpcore.errors import Unsupported


class _DividedWhenDone:
    """The mean of groups that can only add."""

    def __init__(self, work: Any, tensor: torch.Tensor, divisor: int) -> None:
        self._work, self._tensor, self._divisor = work, tensor, divisor

    def wait(self) -> None:
        self._work.wait()
        if self._divisor > 1:
            with torch.no_grad():
                divide_in_place(self._tensor, self._divisor)


class MpiGroup:
    """A communicator of mpi4py. For CPU tensors of the types that numpy has."""

    backend = "mpi"

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self.rank: int = comm.Get_rank()
        self.world_size: int = comm.Get_size()

    def all_reduce(self, tensor: Any, op: str, *, async_op: bool) -> Pending | None:
        from mpi4py import MPI

        if op == "mean" and tensor.dtype == torch.bool:
            raise Unsupported(f"mean has no meaning for {tensor.dtype}")
        operator = MPI.MAX if op == "max" else MPI.SUM
        request = self._comm.Iallreduce(MPI.IN_PLACE, tensor.numpy(), op=operator)
        divisor = self.world_size if op == "mean" else 1
        pending = _DividedWhenDone(_MpiWork(request), tensor, divisor)
        if async_op:
            return pending
        pending.wait()
        return None

    def broadcast(self, tensor: Any, root: int) -> None:
        self._comm.Bcast(tensor.numpy(), root=root)

    def all_gather(self, output: Any, input: Any, *, sizes: Sequence[int] | None = None) -> None:
        lengths = list(sizes) if sizes is not None else [input.numel()] * self.world_size
        self._comm.Allgatherv(input.numpy(), [output.numpy(), lengths])


class _MpiWork:
    def __init__(self, request: Any) -> None:
        self._request = request

    def wait(self) -> None:
        self._request.Wait()
