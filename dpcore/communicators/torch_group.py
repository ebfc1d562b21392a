"""Any process group of torch behind the methods of ``dpcore.Communicator``.

For comparing crosswise: dpcore's reducer and schedules over Gloo, MPI or NCCL, with nothing of
dpcore's own core. What the group can't do by itself (a mean, parts of different sizes) is put
together from what it can; options that only dpcore's core has (algorithm, priority, layout) are
refused. Errors are torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dpcore.communicators.torch_work import TorchWork
from dpcore.errors import Error, Unsupported

_OPERATORS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,  # divided afterwards: not every group can
    "premul_sum": dist.ReduceOp.SUM,  # multiplied beforehand
    "prod": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}


class TorchCommunicator:
    """The ranks of a process group. Made by ``dpcore.init(backend="torch")``, or directly of any
    group."""

    transport = "torch"

    def __init__(self, group: Any = None) -> None:
        self._group: Any = dist.group.WORLD if group is None else group
        self.rank: int = dist.get_rank(self._group)
        self.world_size: int = dist.get_world_size(self._group)
        self.backend = f"torch {dist.get_backend(self._group)}"
        self._closed = False

    # ---- whole buffers -----------------------------------------------------------------------

    def all_reduce(
        self, tensor: Any, op: str = "sum", *, factor: float = 1.0, **options: Any
    ) -> TorchWork | None:
        """See ``Communicator.all_reduce``."""
        own = self._before(tensor, op, factor)
        return self._run(
            lambda: dist.all_reduce(own, _operator(op), self._group, async_op=True),
            [tensor],
            options,
            self._mean_of(own, op),
        )

    def broadcast(self, tensor: Any, root: int = 0, **options: Any) -> TorchWork | None:
        """See ``Communicator.broadcast``."""
        own = _tensor(tensor)
        return self._run(
            lambda: dist.broadcast(own, group=self._group, async_op=True, group_src=root),
            [tensor],
            options,
        )

    def reduce(
        self, tensor: Any, root: int = 0, op: str = "sum", *, factor: float = 1.0, **options: Any
    ) -> TorchWork | None:
        """See ``Communicator.reduce``. The others' tensors stay as they are."""
        target = _tensor(tensor)
        own = target if self.rank == root else target.clone()
        own = self._before(own, op, factor)
        return self._run(
            lambda: dist.reduce(
                own, op=_operator(op), group=self._group, async_op=True, group_dst=root
            ),
            [tensor],
            options,
            self._mean_of(own, op),
        )

    # ---- a part per rank ---------------------------------------------------------------------

    def reduce_scatter(
        self,
        output: Any,
        input: Any,
        op: str = "sum",
        *,
        sizes: Sequence[int] | None = None,
        factor: float = 1.0,
        **options: Any,
    ) -> TorchWork | None:
        """See ``Communicator.reduce_scatter``: an all-reduce of which a part is kept."""
        whole = self._before(_tensor(input).clone().reshape(-1), op, factor)
        lengths = self._lengths(whole.numel(), sizes)
        mean = self._mean_of(whole, op)

        def keep() -> None:
            if mean is not None:
                mean()
            target = _tensor(output)
            target.copy_(torch.split(whole, lengths)[self.rank].view_as(target))

        return self._run(
            lambda: dist.all_reduce(whole, _operator(op), self._group, async_op=True),
            [output],
            options,
            keep,
        )

    def all_gather(
        self, output: Any, input: Any, *, sizes: Sequence[int] | None = None, **options: Any
    ) -> TorchWork | None:
        """See ``Communicator.all_gather``."""
        target = _tensor(output)
        lengths = self._lengths(target.numel(), sizes)
        padded, parts = _padded(_tensor(input), lengths)
        return self._run(
            lambda: dist.all_gather(parts, padded, self._group, async_op=True),
            [output],
            options,
            lambda: _join(target, parts, lengths),
        )

    def gather(
        self,
        output: Any | None,
        input: Any,
        root: int = 0,
        *,
        sizes: Sequence[int] | None = None,
        **options: Any,
    ) -> TorchWork | None:
        """See ``Communicator.gather``."""
        own = _tensor(input)
        lengths = list(sizes) if sizes is not None else [own.numel()] * self.world_size
        padded, parts = _padded(own, lengths)
        target = None if output is None else _tensor(output)
        return self._run(
            lambda: dist.gather(
                padded,
                None if target is None else parts,
                group=self._group,
                async_op=True,
                group_dst=root,
            ),
            [] if output is None else [output],
            options,
            None if target is None else lambda: _join(target, parts, lengths),
        )

    def scatter(
        self,
        output: Any,
        input: Any | None,
        root: int = 0,
        *,
        sizes: Sequence[int] | None = None,
        **options: Any,
    ) -> TorchWork | None:
        """See ``Communicator.scatter``."""
        target = _tensor(output)
        lengths = list(sizes) if sizes is not None else [target.numel()] * self.world_size
        received, parts = _padded(target, lengths)
        if input is not None:
            for part, own in zip(
                parts, torch.split(_tensor(input).reshape(-1), lengths), strict=True
            ):
                part[: own.numel()] = own

        def keep() -> None:
            target.copy_(received[: target.numel()].view_as(target))

        return self._run(
            lambda: dist.scatter(
                received,
                None if input is None else parts,
                group=self._group,
                async_op=True,
                group_src=root,
            ),
            [output],
            options,
            keep,
        )

    def all_to_all(
        self,
        output: Any,
        input: Any,
        *,
        output_sizes: Sequence[int] | None = None,
        input_sizes: Sequence[int] | None = None,
        **options: Any,
    ) -> TorchWork | None:
        """See ``Communicator.all_to_all``."""
        target, own = _tensor(output).reshape(-1), _tensor(input).reshape(-1)
        return self._run(
            lambda: dist.all_to_all_single(
                target,
                own,
                None if output_sizes is None else list(output_sizes),
                None if input_sizes is None else list(input_sizes),
                group=self._group,
                async_op=True,
            ),
            [output],
            options,
        )

    # ---- messages and barriers ---------------------------------------------------------------

    def send(self, tensor: Any, dst: int, *, tag: int = 0, **options: Any) -> TorchWork | None:
        """See ``Communicator.send``."""
        own = _tensor(tensor)
        return self._run(
            lambda: dist.isend(own, group=self._group, tag=tag, group_dst=dst), [tensor], options
        )

    def recv(
        self, tensor: Any, src: int | None, *, tag: int = 0, **options: Any
    ) -> TorchWork | None:
        """See ``Communicator.recv``."""
        own = _tensor(tensor)
        return self._run(
            lambda: dist.irecv(own, group=self._group, tag=tag, group_src=src), [tensor], options
        )

    def barrier(self, **options: Any) -> TorchWork | None:
        """See ``Communicator.barrier``."""
        return self._run(lambda: dist.barrier(self._group, async_op=True), [], options)

    # ---- memory, groups, life ----------------------------------------------------------------

    def empty(self, *shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Ordinary memory: a group of torch has no other."""
        extents: Any = shape  # torch takes numbers and one sequence of them alike
        return torch.empty(*extents, dtype=dtype)

    def split(self, color: int | None, key: int = 0) -> TorchCommunicator | None:
        """See ``Communicator.split``. torch keeps ranks in the order of the whole job."""
        entries: list[Any] = [None] * self.world_size
        job_rank = dist.get_global_rank(self._group, self.rank)
        dist.all_gather_object(entries, (color, key, job_rank), group=self._group)
        ranks = [rank for other, _, rank in sorted(entries, key=_by_key) if other == color]
        if color is None:
            return None
        if ranks != sorted(ranks):
            raise Unsupported("a group of torch orders its ranks by their number; give no key")
        kind = dist.get_backend(self._group)
        return TorchCommunicator(
            dist.new_group(ranks, backend=kind, use_local_synchronization=True)
        )

    def stats(self) -> dict[str, Any]:
        """A group of torch counts nothing."""
        return {}

    def abort(self, reason: str) -> None:
        """Ends the group's operations, as far as its backend can."""
        self._closed = True
        self._group.abort()

    def close(self) -> None:
        """The group stays: it belongs to the program that made it."""
        self._closed = True

    @property
    def closed(self) -> bool:
        """Whether ``close()`` or ``abort()`` was called."""
        return self._closed

    def __repr__(self) -> str:
        return f"<TorchCommunicator rank {self.rank} of {self.world_size}, {self.backend}>"

    # ---- how -----------------------------------------------------------------------------------

    def _run(
        self,
        start: Callable[[], Any],
        result: list[Any],
        options: dict[str, Any],
        finish: Callable[[], None] | None = None,
    ) -> TorchWork | None:
        async_op, timeout = options.pop("async_op", False), options.pop("timeout", 0.0)
        asked = sorted(name for name, value in options.items() if value not in (None, 0))
        if asked:
            raise Unsupported(f"{self.backend}: a group of torch has no {', '.join(asked)}")
        if self._closed:
            raise Error("this communicator was closed")
        work = TorchWork(start(), result, finish)
        if async_op:
            return work
        work.wait(timeout or None)
        return None

    def _before(self, tensor: Any, op: str, factor: float) -> torch.Tensor:
        own = _tensor(tensor)
        takes_factors = own.is_floating_point() or own.is_complex()
        if (op == "premul_sum" and not takes_factors) or (op == "mean" and own.dtype == torch.bool):
            raise Unsupported(f"{op} has no meaning for {own.dtype}")
        if op == "premul_sum":
            with torch.no_grad():
                own.mul_(factor)
        return own

    def _mean_of(self, tensor: torch.Tensor, op: str) -> Callable[[], None] | None:
        if op != "mean":
            return None

        return lambda: divide_in_place(tensor, self.world_size)

    def _lengths(self, elements: int, sizes: Sequence[int] | None) -> list[int]:
        if sizes is not None:
            return list(sizes)
        if elements % self.world_size:
            raise Unsupported(f"{elements} elements are no equal parts; give sizes=")
        return [elements // self.world_size] * self.world_size


def _operator(op: str) -> Any:
    if op not in _OPERATORS:
        raise Unsupported(f"reduction '{op}' does not exist; there are {', '.join(_OPERATORS)}")
    return _OPERATORS[op]


def divide_in_place(total: torch.Tensor, divisor: int) -> None:
    """What makes a sum a mean. Integers are rounded toward zero, as dpcore's own core does it."""
    if total.is_floating_point() or total.is_complex():
        total.div_(divisor)
    else:  # the divisor may be too large for the type
        total.copy_(torch.div(total.long(), divisor, rounding_mode="trunc"))


def _tensor(buffer: Any) -> torch.Tensor:
    """The tensor, or one over the memory of a numpy array. Groups of torch take memory as it lies,
    so one in another order would meet the elements of other indices on other ranks."""
    tensor = buffer if isinstance(buffer, torch.Tensor) else torch.from_numpy(buffer)
    if not tensor.is_contiguous():
        raise Unsupported(
            f"the {type(buffer).__name__} of shape {list(tensor.shape)} is not contiguous; pass "
            ".contiguous(), or numpy.ascontiguousarray(...), and copy the result back"
        )
    return tensor


def _padded(own: torch.Tensor, lengths: Sequence[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Groups exchange parts of one size: all as long as the longest."""
    padded = own.new_zeros(max(lengths))
    padded[: own.numel()] = own.detach().reshape(-1)
    return padded, [torch.zeros_like(padded) for _ in lengths]


def _join(target: torch.Tensor, parts: Sequence[torch.Tensor], lengths: Sequence[int]) -> None:
    pieces = [part[:n] for part, n in zip(parts, lengths, strict=True)]
    target.copy_(torch.cat(pieces).view_as(target))


def _by_key(entry: tuple[int | None, int, int]) -> tuple[int, int]:
    return entry[1], entry[2]
