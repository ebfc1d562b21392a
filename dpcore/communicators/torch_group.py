"""Any process group of torch behind the methods of ``dpcore.Communicator``.

For comparing crosswise: dpcore's reducer and schedules over Gloo, MPI or NCCL, with nothing of
dpcore's own core. What the group can't do by itself (a mean, parts of different sizes) is put
together from what it can; options that only dpcore's core has (algorithm, priority, layout) are
refused, and wrong arguments as the contract says (protocol.py). Later errors are torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

from dpcore.communicators.checks import (
    check_both,
    check_color,
    check_peer,
    check_presence,
    check_rank,
    check_timeout,
    expect,
    lengths_of,
    refuse,
)
from dpcore.communicators.protocol import Capabilities, Collectives, Operator
from dpcore.communicators.torch_buffers import (
    divide_in_place,
    join,
    operator_of,
    padded,
    pair_of,
    tensor_of,
)
from dpcore.communicators.torch_work import TorchWork
from dpcore.communicators.words import OtherNames, operator_name
from dpcore.errors import Error, Unsupported


class TorchCommunicator(OtherNames):
    """The ranks of a process group. Made by ``dpcore.init(backend="torch")``, or directly of any
    group."""

    _capabilities: ClassVar[Capabilities] = Capabilities()
    transport = "torch"

    def __init__(self, group: Any = None) -> None:
        self._group: Any = dist.group.WORLD if group is None else group
        self.rank: int = dist.get_rank(self._group)
        self.world_size: int = dist.get_world_size(self._group)
        self.backend = f"torch {dist.get_backend(self._group)}"
        self._closed = False

    # ---- whole buffers -----------------------------------------------------------------------

    def all_reduce(
        self, tensor: Any, op: Operator = "sum", *, factor: float = 1.0, **options: Any
    ) -> TorchWork | None:
        """See ``Communicator.all_reduce``."""
        call = self._call(options)
        op = operator_name(op)
        own = self._before(tensor, op, factor)
        return self._run(
            lambda: dist.all_reduce(own, operator_of(op), self._group, async_op=True),
            [tensor],
            call,
            self._mean_of(own, op),
        )

    def broadcast(self, tensor: Any, root: int = 0, **options: Any) -> TorchWork | None:
        """See ``Communicator.broadcast``."""
        call = self._call(options)
        check_rank(root, self.world_size, "root")
        own = tensor_of(tensor)
        return self._run(
            lambda: dist.broadcast(own, group=self._group, async_op=True, group_src=root),
            [tensor],
            call,
        )

    def reduce(
        self,
        tensor: Any,
        root: int = 0,
        op: Operator = "sum",
        *,
        factor: float = 1.0,
        **options: Any,
    ) -> TorchWork | None:
        """See ``Communicator.reduce``. The others' tensors stay as they are."""
        call = self._call(options)
        check_rank(root, self.world_size, "root")
        target = tensor_of(tensor)
        op = operator_name(op)
        own = target if self.rank == root else target.clone()
        own = self._before(own, op, factor)
        return self._run(
            lambda: dist.reduce(
                own, op=operator_of(op), group=self._group, async_op=True, group_dst=root
            ),
            [tensor],
            call,
            self._mean_of(own, op),
        )

    # ---- a part per rank ---------------------------------------------------------------------

    def reduce_scatter(
        self,
        output: Any,
        input: Any,
        op: Operator = "sum",
        *,
        sizes: Sequence[int] | None = None,
        factor: float = 1.0,
        **options: Any,
    ) -> TorchWork | None:
        """See ``Communicator.reduce_scatter``: an all-reduce of which a part is kept."""
        call = self._call(options)
        op = operator_name(op)
        target, own = pair_of(output, input)
        lengths = lengths_of(sizes, target.numel(), self.world_size)
        expect(own.numel(), sum(lengths), "input")
        expect(target.numel(), lengths[self.rank], "output")
        whole = self._before(own.clone().reshape(-1), op, factor)
        mean = self._mean_of(whole, op)

        def keep() -> None:
            if mean is not None:
                mean()
            target.copy_(torch.split(whole, lengths)[self.rank].view_as(target))

        return self._run(
            lambda: dist.all_reduce(whole, operator_of(op), self._group, async_op=True),
            [output],
            call,
            keep,
        )

    def all_gather(
        self, output: Any, input: Any, *, sizes: Sequence[int] | None = None, **options: Any
    ) -> TorchWork | None:
        """See ``Communicator.all_gather``."""
        call = self._call(options)
        target, own = pair_of(output, input)
        lengths = lengths_of(sizes, own.numel(), self.world_size)
        expect(own.numel(), lengths[self.rank], "input")
        expect(target.numel(), sum(lengths), "output")
        mine, parts = padded(own, lengths)
        return self._run(
            lambda: dist.all_gather(parts, mine, self._group, async_op=True),
            [output],
            call,
            lambda: join(target, parts, lengths),
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
        call = self._call(options)
        check_rank(root, self.world_size, "root")
        check_presence(output, "output", self.rank, root)
        own = tensor_of(input)
        target = None if output is None else pair_of(output, input)[0]
        lengths = lengths_of(sizes, own.numel(), self.world_size)
        expect(own.numel(), lengths[self.rank], "input")
        if target is not None:
            expect(target.numel(), sum(lengths), "output")
        mine, parts = padded(own, lengths)
        return self._run(
            lambda: dist.gather(
                mine,
                None if target is None else parts,
                group=self._group,
                async_op=True,
                group_dst=root,
            ),
            [] if output is None else [output],
            call,
            None if target is None else lambda: join(target, parts, lengths),
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
        call = self._call(options)
        check_rank(root, self.world_size, "root")
        check_presence(input, "input", self.rank, root)
        target = tensor_of(output)
        lengths = lengths_of(sizes, target.numel(), self.world_size)
        expect(target.numel(), lengths[self.rank], "output")
        received, parts = padded(target, lengths)
        if input is not None:
            whole = pair_of(output, input)[1].detach().reshape(-1)
            expect(whole.numel(), sum(lengths), "input")
            for part, own in zip(parts, torch.split(whole, lengths), strict=True):
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
            call,
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
        call = self._call(options)
        check_both(output_sizes, input_sizes)
        target, own = (tensor.reshape(-1) for tensor in pair_of(output, input))
        sends = lengths_of(input_sizes, own.numel() // self.world_size, self.world_size)
        takes = lengths_of(output_sizes, sends[0], self.world_size)
        expect(own.numel(), sum(sends), "input")
        expect(target.numel(), sum(takes), "output")
        return self._run(
            lambda: dist.all_to_all_single(
                target,
                own,
                None if output_sizes is None else takes,
                None if input_sizes is None else sends,
                group=self._group,
                async_op=True,
            ),
            [output],
            call,
        )

    # ---- messages and barriers ---------------------------------------------------------------

    def send(self, tensor: Any, dst: int, *, tag: int = 0, **options: Any) -> TorchWork | None:
        """See ``Communicator.send``."""
        call = self._call(options)
        check_peer(dst, self.rank, self.world_size)
        own = tensor_of(tensor)
        return self._run(
            lambda: dist.isend(own, group=self._group, tag=tag, group_dst=dst), [tensor], call
        )

    def recv(
        self, tensor: Any, src: int | None, *, tag: int = 0, **options: Any
    ) -> TorchWork | None:
        """See ``Communicator.recv``."""
        call = self._call(options)
        if src is not None:
            check_peer(src, self.rank, self.world_size)
        own = tensor_of(tensor)
        return self._run(
            lambda: dist.irecv(own, group=self._group, tag=tag, group_src=src), [tensor], call
        )

    def barrier(self, **options: Any) -> TorchWork | None:
        """See ``Communicator.barrier``."""
        call = self._call(options)
        return self._run(lambda: dist.barrier(self._group, async_op=True), [], call)

    # ---- memory, groups, life ----------------------------------------------------------------

    def empty(self, *shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Ordinary memory: a group of torch has no other."""
        extents: Any = shape  # torch takes numbers and one sequence of them alike
        return torch.empty(*extents, dtype=dtype)

    def split(self, color: int | None, key: int = 0) -> TorchCommunicator | None:
        """See ``Communicator.split``. torch keeps ranks in the order of the whole job."""
        check_color(color)
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

    def _call(self, options: dict[str, Any]) -> tuple[bool, float]:
        """Whether to wait, and for how long. Before anything is touched."""
        async_op, timeout = options.pop("async_op", False), options.pop("timeout", 0.0)
        refuse(options, f"{self.backend}: a group of torch")
        check_timeout(timeout)
        if self._closed:
            raise Error(f"rank {self.rank}: this communicator was closed; call init() again")
        return async_op, timeout

    def _run(
        self,
        start: Callable[[], Any],
        result: list[Any],
        call: tuple[bool, float],
        finish: Callable[[], None] | None = None,
    ) -> TorchWork | None:
        async_op, timeout = call
        work = TorchWork(start(), result, finish)
        if async_op:
            return work
        work.wait(timeout or None)
        return None

    def _before(self, tensor: Any, op: str, factor: float) -> torch.Tensor:
        own = tensor_of(tensor)
        operator_of(op)
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


def _by_key(entry: tuple[int | None, int, int]) -> tuple[int, int]:
    return entry[1], entry[2]


if TYPE_CHECKING:
    _keeps_the_contract: type[Collectives] = TorchCommunicator
