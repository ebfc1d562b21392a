"""Any process group of torch behind the methods of ``dpcore.Communicator``.

For comparing crosswise: dpcore's reducer and schedules over Gloo, MPI or NCCL, with nothing of
dpcore's own core. What the group can't do by itself (a mean, parts of different sizes) is put
together from what it can; options that only dpcore's core has (algorithm, priority, layout) are
refused, and wrong arguments as the contract says (protocol.py). Later errors are torch's.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from dpcore.comm.communicators import gloo_threads  # noqa: F401  # waits at the program's end
from dpcore.comm.communicators.checked_calls import Call, CheckedCalls
from dpcore.comm.communicators.checks import check_groups
from dpcore.comm.communicators.torch_buffers import (
    divide_in_place,
    join,
    operator_of,
    padded,
)
from dpcore.comm.communicators.torch_work import TorchWork
from dpcore.errors import Unsupported

Start = Callable[[], Any]
Requests = tuple[Start, Callable[[], Any] | None]  # what starts it, what is done with its result


class TorchCommunicator(CheckedCalls[TorchWork]):
    """The ranks of a process group. Made by ``dpcore.init(backend="torch")``, or directly of any
    group."""

    _lacks = frozenset({"algorithm", "priority", "layout"})
    backend = "torch"
    transport = "torch"

    def __init__(self, group: Any = None) -> None:
        self._group: Any = dist.group.WORLD if group is None else group
        self.rank: int = dist.get_rank(self._group)
        self.world_size: int = dist.get_world_size(self._group)
        self.backend = f"torch {dist.get_backend(self._group)}"
        self._who = f"{self.backend}: a group of torch"

    # ---- what the group is asked for ----------------------------------------------------------

    def _all_reduce(self, own: torch.Tensor, op: str, factor: float) -> Requests:
        own = self._before(own, op, factor)
        return self._asks(dist.all_reduce, own, operator_of(op)), self._mean_of(own, op)

    def _broadcast(self, own: torch.Tensor, root: int) -> Requests:
        return self._asks(dist.broadcast, own, group_src=root), None

    def _reduce(self, own: torch.Tensor, op: str, factor: float, root: int) -> Requests:
        own = self._before(own if self.rank == root else own.clone(), op, factor)
        start = self._asks(dist.reduce, own, op=operator_of(op), group_dst=root)
        return start, self._mean_of(own, op)

    def _reduce_scatter(
        self, target: torch.Tensor, own: torch.Tensor, lengths: list[int], op: str, factor: float
    ) -> Requests:
        """An all-reduce of which a part is kept."""
        whole = own.clone()
        start, mean = self._all_reduce(whole, op, factor)

        def keep() -> None:
            if mean is not None:
                mean()
            target.copy_(torch.split(whole, lengths)[self.rank])

        return start, keep

    def _all_gather(self, target: torch.Tensor, own: torch.Tensor, lengths: list[int]) -> Requests:
        mine, parts = padded(own, lengths)
        return self._asks(dist.all_gather, parts, mine), partial(join, target, parts, lengths)

    def _gather(
        self, target: torch.Tensor | None, own: torch.Tensor, lengths: list[int], root: int
    ) -> Requests:
        mine, parts = padded(own, lengths)
        if target is None:
            return self._asks(dist.gather, mine, None, group_dst=root), None
        start = self._asks(dist.gather, mine, parts, group_dst=root)
        return start, partial(join, target, parts, lengths)

    def _scatter(
        self, target: torch.Tensor, whole: torch.Tensor | None, lengths: list[int], root: int
    ) -> Requests:
        received, parts = padded(target, lengths)
        if whole is not None:
            for part, own in zip(parts, torch.split(whole, lengths), strict=True):
                part[: own.numel()] = own
        given = None if whole is None else parts
        start = self._asks(dist.scatter, received, given, group_src=root)
        return start, partial(target.copy_, received[: target.numel()])

    def _all_to_all(
        self, target: torch.Tensor, own: torch.Tensor, takes: list[int], sends: list[int]
    ) -> Requests:
        return self._asks(dist.all_to_all_single, target, own, takes, sends), None

    def _send(self, own: torch.Tensor, dst: int, tag: int) -> Requests:
        return partial(dist.isend, own, group=self._group, tag=tag, group_dst=dst), None

    def _recv(self, own: torch.Tensor, src: int | None, tag: int) -> Requests:
        return partial(dist.irecv, own, group=self._group, tag=tag, group_src=src), None

    def _barrier(self) -> Requests:
        return self._asks(dist.barrier), None

    # ---- groups, life ------------------------------------------------------------------------

    def split(self, color: int | None, key: int = 0) -> TorchCommunicator | None:
        """See ``Communicator.split``. torch keeps ranks in the order of the whole job."""
        check_groups(color, key)
        kind = dist.get_backend(self._group)
        if kind == "mpi":
            raise Unsupported("a group over MPI takes all ranks of the job: call dist.new_group()")
        entries: list[Any] = [None] * self.world_size
        job_rank = dist.get_global_rank(self._group, self.rank)
        own = (color, key, job_rank, uuid.uuid4().hex)
        dist.all_gather_object(entries, own, group=self._group)
        if color is None:
            return None
        members = [entry for entry in sorted(entries, key=_by_key) if entry[0] == color]
        ranks = [rank for _, _, rank, _ in members]
        if ranks != sorted(ranks):
            raise Unsupported("a group of torch orders its ranks by their number; leave out key=")
        return TorchCommunicator(_new_group(members[0][3], ranks, kind))

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

    # ---- how -----------------------------------------------------------------------------------

    @property
    def _compiled(self) -> Any:
        """The process group, whose all-reduces a reducer calls without Python."""
        return self._group

    def _asks(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Start:
        return partial(function, *arguments, **named, group=self._group, async_op=True)

    def _run(
        self, call: Call, flat: torch.Tensor | None, requests: Requests, *buffers: Any
    ) -> TorchWork | None:
        start, finish = requests
        work = TorchWork(start(), [buffer for buffer in buffers[:1] if buffer is not None], finish)
        if call.async_op:
            return work
        work.wait(call.timeout or None)
        return None

    def _before(self, own: torch.Tensor, op: str, factor: float) -> torch.Tensor:
        takes_factors = own.is_floating_point() or own.is_complex()
        if (op == "premul_sum" and not takes_factors) or (op == "mean" and own.dtype == torch.bool):
            raise Unsupported(f"{op} has no meaning for {own.dtype}")
        if op == "mean" and own.dtype == torch.float16:  # the sum may be too large for the type
            return own.div_(self.world_size)
        return own.mul_(factor) if op == "premul_sum" else own

    def _mean_of(self, tensor: torch.Tensor, op: str) -> Callable[[], Any] | None:
        if op != "mean" or tensor.dtype == torch.float16:
            return None
        return partial(divide_in_place, tensor, self.world_size)


def _by_key(entry: tuple[int | None, int, int, str]) -> tuple[int, int]:
    return entry[1], entry[2]


def _new_group(name: str, ranks: list[int], kind: str) -> Any:
    """As ``dist.new_group``, without the ranks that are not in it and with a name from us: torch
    counts the groups of each rank for one, and ranks may have different numbers of them."""
    inner: Any = dist.distributed_c10d
    default = inner._get_default_group()
    group, _ = inner._new_process_group_helper(
        len(ranks),
        ranks.index(default.rank()),
        ranks,
        dist.Backend(kind),
        inner._world.pg_map[default][1],
        name,
        timeout=inner._get_default_timeout(dist.Backend(kind)),
        device_id=default.bound_device_id,
    )
    inner._world.pg_group_ranks[group] = {rank: index for index, rank in enumerate(ranks)}
    return group
