"""A communicator of mpi4py as a group that gradients can be averaged in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from dpcore.communicators.checks import check_rank, expect, lengths_of
from dpcore.communicators.protocol import GradientGroup, Pending
from dpcore.communicators.torch_buffers import divide_in_place
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
    """A communicator of mpi4py: a ``GradientGroup``, not all of ``Collectives``. For CPU tensors of
    the types that numpy has."""

    backend = "mpi"

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self.rank: int = comm.Get_rank()
        self.world_size: int = comm.Get_size()

    def all_reduce(self, tensor: Any, op: str, *, async_op: bool) -> Pending | None:
        from mpi4py import MPI

        operator = {"sum": MPI.SUM, "mean": MPI.SUM, "max": MPI.MAX}.get(op)
        if operator is None:
            raise Unsupported(f'reduction "{op}" over mpi4py: use sum, mean, max')
        if op == "mean" and tensor.dtype == torch.bool:
            raise Unsupported(f"mean has no meaning for {tensor.dtype}")
        request = self._comm.Iallreduce(MPI.IN_PLACE, tensor.numpy(), op=operator)
        divisor = self.world_size if op == "mean" else 1
        pending = _DividedWhenDone(_MpiWork(request), tensor, divisor)
        if async_op:
            return pending
        pending.wait()
        return None

    def broadcast(self, tensor: Any, root: int) -> None:
        check_rank(root, self.world_size, "root")
        self._comm.Bcast(tensor.numpy(), root=root)

    def all_gather(self, output: Any, input: Any, *, sizes: Sequence[int] | None = None) -> None:
        lengths = lengths_of(sizes, input.numel(), self.world_size)
        expect(input.numel(), lengths[self.rank], "input")
        expect(output.numel(), sum(lengths), "output")
        self._comm.Allgatherv(input.numpy(), [output.numpy(), lengths])


class _MpiWork:
    def __init__(self, request: Any) -> None:
        self._request = request

    def wait(self) -> None:
        self._request.Wait()


if TYPE_CHECKING:
    _keeps_the_contract: type[GradientGroup] = MpiGroup
