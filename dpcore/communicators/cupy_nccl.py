"""``backend="cupy"``: NCCL as CuPy holds it, on torch's CUDA tensors.

For programs that have CuPy's communicator anyway, and to compare. Each call goes from Python to
``cupy.cuda.nccl.NcclCommunicator`` with addresses and a stream; ``backend="nccl"`` does the same
from C++, without the GIL, watches for ranks that are gone, and has more algorithms. Here a rank
that does not come is noticed by whoever synchronises with the GPU.

Order is kept as there: work goes to a stream of its own, after what the current stream holds, and
``wait()`` puts what comes next behind it. Memory of tensors that are let go of earlier stays theirs
until the GPU is done with it.

NCCL's premultiplied sums are nothing that CuPy has, nor are there messages with tags, deadlines or
algorithms to choose.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from dpcore.communicators.cupy_streams import CupyWork, TorchStreams
from dpcore.errors import Error, Unsupported

if TYPE_CHECKING:
    import torch

    from dpcore.communicators.native import Communicator

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
_OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "mean": 4, "avg": 4}
_OPS_OF_BOOL = {"sum": 2, "max": 2, "bor": 2, "prod": 3, "min": 3, "band": 3}
_BYTES = _TYPES["int8"]


class CupyCommunicator:
    """A group of ranks over ``cupy.cuda.nccl``. Made by ``dpcore.init(backend="cupy")``."""

    backend = "cupy"

    def __init__(self, control: Communicator, nccl: Any, device: Any, streams: Any) -> None:
        self._control, self._nccl, self._streams = control, nccl, streams
        self.device = device
        self.rank, self.world_size = control.rank, control.world_size
        identity = bytearray(_packed(nccl.get_unique_id()) if self.rank == 0 else bytes(128))
        control.broadcast(identity, 0)
        self._comm = nccl.NcclCommunicator(self.world_size, _unpacked(identity), self.rank)

    # ---- collectives -------------------------------------------------------------------------

    def all_reduce(
        self, tensor: Any, op: str = "sum", *, async_op: bool = False
    ) -> CupyWork | None:
        """Combines ``tensor`` over all ranks, in place."""
        address, count, kind, operator = self._reduction(tensor, op)
        self._streams.begin()
        self._comm.allReduce(address, address, count, kind, operator, self._streams.address)
        return self._done(async_op, tensor)

    def reduce(
        self, tensor: Any, root: int = 0, op: str = "sum", *, async_op: bool = False
    ) -> CupyWork | None:
        """Like ``all_reduce``, for ``root`` alone."""
        address, count, kind, operator = self._reduction(tensor, op)
        self._streams.begin()
        self._comm.reduce(address, address, count, kind, operator, root, self._streams.address)
        return self._done(async_op, tensor)

    def reduce_scatter(
        self,
        output: Any,
        input: Any,
        op: str = "sum",
        *,
        sizes: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> CupyWork | None:
        """Leaves the r-th part of the combined ``input`` in rank r's ``output``; ``sizes``
        (elements) when parts differ."""
        source, count, kind, operator = self._reduction(input, op)
        target = self._address(output, "output")
        lengths = self._lengths(sizes, output, "output")
        self._expect(count, sum(lengths), "input")
        stream = self._streams.address
        self._streams.begin()
        if sizes is None:
            self._comm.reduceScatter(source, target, lengths[0], kind, operator, stream)
        else:
            with self._group():
                for root, address, part in self._parts(source, lengths, input):
                    self._comm.reduce(address, target, part, kind, operator, root, stream)
        return self._done(async_op, output, input)

    def broadcast(self, tensor: Any, root: int = 0, *, async_op: bool = False) -> CupyWork | None:
        """Copies ``tensor`` of ``root`` to all."""
        address = self._address(tensor, "tensor")
        self._streams.begin()
        self._comm.broadcast(
            address, address, _size_of(tensor), _BYTES, root, self._streams.address
        )
        return self._done(async_op, tensor)

    def all_gather(
        self,
        output: Any,
        input: Any,
        *,
        sizes: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> CupyWork | None:
        """Everybody's ``input``, one after the other; ``sizes`` (elements) when they differ."""
        target, source = self._address(output, "output"), self._address(input, "input")
        lengths = self._lengths(sizes, input, "input")
        self._expect(output.numel(), sum(lengths), "output")
        stream = self._streams.address
        self._streams.begin()
        if sizes is None:
            self._comm.allGather(source, target, _size_of(input), _BYTES, stream)
        else:
            with self._group():
                for root, address, length in self._parts(target, lengths, output):
                    origin = source if root == self.rank else address
                    count = length * input.element_size()
                    self._comm.broadcast(origin, address, count, _BYTES, root, stream)
        return self._done(async_op, output, input)

    def gather(
        self,
        output: Any | None,
        input: Any,
        root: int = 0,
        *,
        sizes: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> CupyWork | None:
        """``all_gather`` for one rank: ``output`` is None on the others."""
        self._check_presence(output, "output", root)
        source, lengths = self._address(input, "input"), self._lengths(sizes, input, "input")
        messages = [("send", source, _size_of(input), root)]
        if output is not None:
            target = self._address(output, "output")
            self._expect(output.numel(), sum(lengths), "output")
            for rank, address, length in self._parts(target, lengths, output):
                messages.append(("recv", address, length * output.element_size(), rank))
        self._exchange(messages)
        return self._done(async_op, *([input] if output is None else [output, input]))

    def scatter(
        self,
        output: Any,
        input: Any | None,
        root: int = 0,
        *,
        sizes: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> CupyWork | None:
        """Gives the r-th part of ``root``'s ``input`` to rank r; ``input`` is None elsewhere."""
        self._check_presence(input, "input", root)
        target, lengths = self._address(output, "output"), self._lengths(sizes, output, "output")
        messages = [("recv", target, _size_of(output), root)]
        if input is not None:
            source = self._address(input, "input")
            self._expect(input.numel(), sum(lengths), "input")
            for rank, address, length in self._parts(source, lengths, input):
                messages.append(("send", address, length * input.element_size(), rank))
        self._exchange(messages)
        return self._done(async_op, *([output] if input is None else [output, input]))

    def all_to_all(self, output: Any, input: Any, *, async_op: bool = False) -> CupyWork | None:
        """The d-th part of ``input`` to rank d; not in place."""
        target, source = self._address(output, "output"), self._address(input, "input")
        self._expect(output.numel(), input.numel(), "output")
        self._expect(input.numel() % self.world_size, 0, "the rest of input divided by the world")
        if target == source:
            raise Unsupported("all_to_all in place: backend='cupy' needs two tensors")
        part = _size_of(input) // self.world_size
        messages = []
        for peer in range(self.world_size):
            messages.append(("send", source + peer * part, part, peer))
            messages.append(("recv", target + peer * part, part, peer))
        self._exchange(messages)
        return self._done(async_op, output, input)

    def send(self, tensor: Any, dst: int, *, async_op: bool = False) -> CupyWork | None:
        """To rank ``dst``."""
        address = self._address(tensor, "tensor")
        self._streams.begin()
        self._comm.send(address, _size_of(tensor), _BYTES, dst, self._streams.address)
        return self._done(async_op, tensor)

    def recv(self, tensor: Any, src: int, *, async_op: bool = False) -> CupyWork | None:
        """The next message of rank ``src``, of this size."""
        address = self._address(tensor, "tensor")
        self._streams.begin()
        self._comm.recv(address, _size_of(tensor), _BYTES, src, self._streams.address)
        return self._done(async_op, tensor)

    def barrier(self) -> None:
        """Returns when every rank has called it; says nothing about work on the GPU."""
        self._control.barrier()

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

    # ---- parts -------------------------------------------------------------------------------

    def _address(self, tensor: Any, role: str) -> int:
        if self._control.closed:
            raise Error(f"rank {self.rank}: this communicator was finalized; call init() again")
        if tensor.device != self.device:
            raise Unsupported(
                f"{role}: the tensor is on {tensor.device}, this communicator works on "
                f"{self.device}; move it with .to('{self.device}')"
            )
        if not tensor.is_contiguous():
            raise Unsupported(f"{role}: the tensor is not contiguous; pass .contiguous()")
        return int(tensor.data_ptr())

    def _reduction(self, tensor: Any, op: str) -> tuple[int, int, int, int]:
        name = str(tensor.dtype).removeprefix("torch.")
        operator = (_OPS_OF_BOOL if name == "bool" else _OPS).get(op)
        if name not in _TYPES or operator is None:
            raise Unsupported(
                f"{op} of {name} is nothing that NCCL can do through CuPy; use backend='nccl'"
            )
        return self._address(tensor, "tensor"), tensor.numel(), _TYPES[name], operator

    def _expect(self, have: int, want: int, role: str) -> None:
        if have != want:
            raise Unsupported(f"{role} has {have} elements, {want} are needed")

    def _lengths(self, sizes: Sequence[int] | None, own: Any, role: str) -> list[int]:
        """Elements of each rank's part; ``own`` holds this rank's."""
        if sizes is None:
            return [own.numel()] * self.world_size
        if len(sizes) != self.world_size:
            raise Unsupported(f"sizes has {len(sizes)} entries, {self.world_size} are needed")
        self._expect(own.numel(), sizes[self.rank], role)
        return list(sizes)

    def _parts(
        self, address: int, lengths: Sequence[int], whole: Any
    ) -> Iterator[tuple[int, int, int]]:
        """(rank, where its part begins, elements) of parts that lie one after the other; nobody
        sends or awaits an empty one."""
        ends = accumulate(lengths)
        for rank, (length, end) in enumerate(zip(lengths, ends, strict=True)):
            if length > 0:
                yield rank, address + (end - length) * whole.element_size(), length

    @contextlib.contextmanager
    def _group(self) -> Iterator[None]:
        """What is called within travels at the same time."""
        self._nccl.groupStart()
        try:
            yield
        finally:  # left open, it would keep whatever this thread calls of NCCL from here on
            self._nccl.groupEnd()

    def _exchange(self, messages: Sequence[tuple[str, int, int, int]]) -> None:
        """Messages ("send" or "recv", address, bytes, other rank) at the same time."""
        self._streams.begin()
        with self._group():
            for call, address, count, peer in messages:
                if count > 0:
                    getattr(self._comm, call)(address, count, _BYTES, peer, self._streams.address)

    def _check_presence(self, buffer: Any, role: str, root: int) -> None:
        if not 0 <= root < self.world_size:
            raise ValueError(f"root {root} is not a rank: 0..{self.world_size - 1}")
        if (buffer is None) == (self.rank == root):
            wanted = "needed" if self.rank == root else "to be None"
            raise ValueError(f"rank {self.rank}: {role} is {wanted} here (root is {root})")

    def _done(self, async_op: bool, *tensors: Any) -> CupyWork | None:
        work = CupyWork(self._streams, self._streams.end(), tensors)
        if async_op:
            self._streams.keep(tensors)  # the work may be dropped, and they with it
            return work
        work.wait()
        return None

    def __repr__(self) -> str:
        return f"<CupyCommunicator rank {self.rank} of {self.world_size} on {self.device}>"


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
    import torch

    torch.cuda.set_device(device)
    return CupyCommunicator(control, nccl, device, TorchStreams(device))


def _size_of(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


def _packed(identity: Sequence[int]) -> bytes:
    """CuPy has the 128 bytes as a tuple of signed numbers."""
    return bytes(number % 256 for number in identity)


def _unpacked(identity: bytes | bytearray) -> tuple[int, ...]:
    return tuple(number - 256 if number > 127 else number for number in identity)
