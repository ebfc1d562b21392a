"""``backend="cupy"``: NCCL as CuPy holds it, on torch's CUDA tensors.

For programs that have CuPy's communicator anyway, and to compare. Each call goes from Python to
``cupy.cuda.nccl.NcclCommunicator`` with addresses and a stream; ``backend="nccl"`` does the same
from C++, without the GIL, watches for ranks that are gone, and has more algorithms. Here a rank
that does not come is noticed by the code that synchronises with the GPU.

Order is kept as there: work goes to a stream of its own, after what the current stream holds, and
``wait()`` puts what comes next behind it. Memory of tensors that the program drops earlier is kept
until the GPU is done with it.

CuPy does not have NCCL's premultiplied sums, and here are no messages with tags, no deadlines and
no choice of algorithms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from dpcore.comm.communicators.checked_calls import Call, CheckedCalls
from dpcore.comm.communicators.cupy_streams import CupyWork, TorchStreams
from dpcore.errors import Unsupported

if TYPE_CHECKING:
    from dpcore.comm.communicators.native import Communicator

_COUNTERPARTS = {"send": "recv", "recv": "send"}

# The library's own numbers. CuPy has no name for bfloat16 and for the mean.
_TYPES = {
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "int64": 4,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
    "bool": 1,
}
_OPS = {"sum": 0, "mean": 4, "prod": 1, "max": 2, "min": 3}
_OPS_OF_BOOL = {"sum": 2, "max": 2, "bor": 2, "prod": 3, "min": 3, "band": 3}
_BYTES = _TYPES["int8"]

Request = Callable[[], Any]  # what gives the operation to NCCL
Message = tuple[str, torch.Tensor, int]  # "send" or "recv", a part, the other rank


class CupyCommunicator(CheckedCalls[CupyWork]):
    """A group of ranks over ``cupy.cuda.nccl``. Made by ``dpcore.init(backend="cupy")``."""

    backend = "cupy"
    _who, _instead = "backend='cupy'", "; use backend='nccl'"
    _lacks = frozenset({"algorithm", "priority", "layout", "timeout", "tag", "factor"})

    def __init__(self, control: Communicator, nccl: Any, device: Any, streams: Any) -> None:
        self._control, self._nccl, self._streams = control, nccl, streams
        self.device = device
        self.rank, self.world_size = control.rank, control.world_size
        identity = bytearray(_packed(nccl.get_unique_id()) if self.rank == 0 else bytes(128))
        control.broadcast(identity, 0)
        self._comm = _meet(nccl, self.world_size, bytes(identity), self.rank)

    # ---- what NCCL is asked for --------------------------------------------------------------

    def _all_reduce(self, own: torch.Tensor, op: str, factor: float) -> Request:
        kind, operator = _numbers_of(op, own.dtype)
        return self._asks("allReduce", own, own, own.numel(), kind, operator)

    def _reduce(self, own: torch.Tensor, op: str, factor: float, root: int) -> Request:
        kind, operator = _numbers_of(op, own.dtype)
        return self._asks("reduce", own, own, own.numel(), kind, operator, root)

    def _reduce_scatter(
        self, target: torch.Tensor, own: torch.Tensor, lengths: list[int], op: str, factor: float
    ) -> Request:
        kind, operator = _numbers_of(op, own.dtype)
        if len(set(lengths)) == 1:
            return self._asks("reduceScatter", own, target, lengths[0], kind, operator)
        return self._together(
            self._asks("reduce", part, target, part.numel(), kind, operator, root)
            for root, part in _parts(own, lengths)
        )

    def _broadcast(self, own: torch.Tensor, root: int) -> Request:
        return self._asks("broadcast", own, own, own.nbytes, _BYTES, root)

    def _all_gather(self, target: torch.Tensor, own: torch.Tensor, lengths: list[int]) -> Request:
        if len(set(lengths)) == 1:
            return self._asks("allGather", own, target, own.nbytes, _BYTES)
        return self._together(
            self._asks(
                "broadcast", own if root == self.rank else part, part, part.nbytes, _BYTES, root
            )
            for root, part in _parts(target, lengths)
        )

    def _gather(
        self, target: torch.Tensor | None, own: torch.Tensor, lengths: list[int], root: int
    ) -> Request:
        return self._with_root("send", own, target, lengths, root)

    def _scatter(
        self, target: torch.Tensor, whole: torch.Tensor | None, lengths: list[int], root: int
    ) -> Request:
        return self._with_root("recv", target, whole, lengths, root)

    def _with_root(
        self,
        call: str,
        own: torch.Tensor,
        whole: torch.Tensor | None,
        lengths: list[int],
        root: int,
    ) -> Request:
        """Each rank's ``own`` part is sent to, or received from, the ``whole`` that root has."""
        messages = [(call, own, root)]
        if whole is not None:
            back = _COUNTERPARTS[call]
            messages += [(back, part, rank) for rank, part in _parts(whole, lengths)]
        return self._exchange(messages)

    def _all_to_all(
        self, target: torch.Tensor, own: torch.Tensor, takes: list[int], sends: list[int]
    ) -> Request:
        if target.data_ptr() == own.data_ptr():
            raise Unsupported("all_to_all in place: backend='cupy' needs two tensors")
        parts = zip(torch.split(own, sends), torch.split(target, takes), strict=True)
        return self._exchange(
            message
            for peer, (given, taken) in enumerate(parts)
            for message in (("send", given, peer), ("recv", taken, peer))
        )

    def _send(self, own: torch.Tensor, dst: int, tag: int) -> Request:
        return self._asks("send", own, own.nbytes, _BYTES, dst)

    def _recv(self, own: torch.Tensor, src: int | None, tag: int) -> Request:
        if src is None:
            raise Unsupported(f"{self._who} receives from a rank that is named{self._instead}")
        return self._asks("recv", own, own.nbytes, _BYTES, src)

    # ---- how ---------------------------------------------------------------------------------

    def _asks(self, call: str, *arguments: Any) -> Request:
        """A call of NCCL, with the addresses of tensors, in the communication stream."""
        plain = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]
        return lambda: getattr(self._comm, call)(*plain, self._streams.address)

    def _together(self, requests: Iterator[Request]) -> Request:
        return partial(self._start_together, list(requests))

    def _start_together(self, requests: Sequence[Request]) -> None:
        """What these send travels at the same time."""
        self._nccl.groupStart()
        try:
            for start in requests:
                start()
        finally:  # left open, it would keep whatever this thread calls of NCCL from here on
            self._nccl.groupEnd()

    def _exchange(self, messages: Iterable[Message]) -> Request:
        return self._together(
            self._asks(call, part, part.nbytes, _BYTES, peer)
            for call, part, peer in messages
            if part.numel() > 0
        )

    def _flat(self, buffer: Any) -> torch.Tensor:
        if not isinstance(buffer, torch.Tensor):
            raise TypeError(f"expected a torch tensor, not {type(buffer).__name__}")
        if buffer.device != self.device:
            raise Unsupported(
                f"the tensor is on {buffer.device}, this communicator works on {self.device}; "
                f"move it with .to('{self.device}')"
            )
        return super()._flat(buffer)

    def _run(
        self, call: Call, flat: torch.Tensor | None, requests: Request, *buffers: Any
    ) -> CupyWork | None:
        tensors = [buffer for buffer in buffers if buffer is not None]
        self._streams.begin()
        requests()
        work = CupyWork(self._streams, self._streams.end(), tensors)
        if call.async_op:
            self._streams.keep(tensors)  # the work may be dropped, and they with it
            return work
        work.wait()
        return None

    def _perform(self, name: str, *buffers: Any, **options: Any) -> Any:
        if name == "barrier":  # which says nothing about work on the GPU
            return self._control.barrier(**options)
        return super()._perform(name, *buffers, **options)

    # ---- groups, life ------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """What carries the bytes, and where: CuPy counts nothing."""
        return {"backend": self.backend, "device": str(self.device)}

    def split(self, color: int | None, key: int = 0) -> CupyCommunicator | None:
        """Groups of ranks, see ``Communicator.split``. Their work goes to the same stream."""
        control = self._control.split(color, key)
        if control is None:
            return None
        return CupyCommunicator(control, self._nccl, self.device, self._streams)

    def close(self) -> None:
        """Leaves. Closing twice is fine."""
        if not self.closed:
            self._comm.destroy()
            self._control.close()

    @property
    def closed(self) -> bool:
        """Whether ``close()`` was called."""
        return self._control.closed

    def abort(self, reason: str) -> None:
        """Gives up; the others notice at their next call."""
        self._comm.abort()
        self._control.abort(reason)

    @property
    def transport(self) -> str:
        """How the ranks met, see ``Communicator.transport``."""
        return self._control.transport

    @property
    def _place(self) -> str:
        return f"cupy on {self.device}"


def _parts(whole: torch.Tensor, lengths: Sequence[int]) -> Iterator[tuple[int, torch.Tensor]]:
    """(rank, its part) of parts that lie one after the other; no rank sends or awaits an empty
    one."""
    for rank, part in enumerate(torch.split(whole, list(lengths))):
        if part.numel() > 0:
            yield rank, part


def _numbers_of(op: str, dtype: Any) -> tuple[int, int]:
    """NCCL's numbers for the type and the operator of a reduction."""
    name = str(dtype).removeprefix("torch.")
    operator = (_OPS_OF_BOOL if name == "bool" else _OPS).get(op)
    if name not in _TYPES or operator is None:
        raise Unsupported(
            f"{op} of {name} is not possible with NCCL through CuPy; use backend='nccl'"
        )
    return _TYPES[name], operator


def _packed(identity: Sequence[int]) -> bytes:
    """Before 14.0 CuPy had the 128 bytes as a tuple of signed numbers."""
    return bytes(number % 256 for number in identity)


def _meet(nccl: Any, world_size: int, identity: bytes, rank: int) -> Any:
    """NCCL's communicator as CuPy holds it. Since 14.0 it takes the bytes as they are."""
    try:
        return nccl.NcclCommunicator(world_size, identity, rank)
    except TypeError:
        signed = tuple(number - 256 if number > 127 else number for number in identity)
        return nccl.NcclCommunicator(world_size, signed, rank)


def start_cupy(control: Communicator, device: torch.device) -> CupyCommunicator:
    """Over the ranks of ``control``, which it takes over. Raises ``Unsupported`` without CuPy."""
    try:
        from cupy.cuda import nccl
    except ImportError as problem:
        raise Unsupported(
            f"backend='cupy' needs CuPy ({problem}): install cupy-cuda13x or cupy-cuda12x, as "
            "torch.version.cuda says, or use backend='nccl', which needs neither"
        ) from problem
    if not getattr(nccl, "available", True):
        raise Unsupported("this CuPy was built without NCCL; use backend='nccl'")
    torch.cuda.set_device(device)
    return CupyCommunicator(control, nccl, device, TorchStreams(device))
