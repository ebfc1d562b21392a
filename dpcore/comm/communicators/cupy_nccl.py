"""``backend="cupy"``: NCCL as CuPy holds it, on torch's CUDA tensors.

For programs that have CuPy's communicator anyway, and to compare. Each call goes from Python to
``cupy.cuda.nccl.NcclCommunicator`` with addresses and a stream; ``backend="nccl"`` does the same
from C++, without the GIL, watches for ranks that are gone, and has more algorithms. Here a rank
that does not come is noticed by whoever synchronises with the GPU.

Order is kept as there: work goes to a stream of its own, after what the current stream holds, and
``wait()`` puts what comes next behind it. Memory of tensors that the program drops earlier is kept
until the GPU is done with it.

CuPy does not have NCCL's premultiplied sums, and here are no messages with tags, no deadlines and
no choice of algorithms.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar

from dpcore.comm.communicators.checks import (
    check_both,
    check_peer,
    check_presence,
    check_rank,
    expect,
    lengths_of,
    refuse,
)
from dpcore.comm.communicators.cupy_numbers import BYTES, meet, numbers_of, packed, size_of
from dpcore.comm.communicators.cupy_streams import CupyWork, TorchStreams
from dpcore.comm.communicators.protocol import Capabilities, Collectives, Operator
from dpcore.comm.communicators.words import OtherNames, operator_name
from dpcore.errors import Error, Unsupported

if TYPE_CHECKING:
    import torch

    from dpcore.comm.communicators.native import Communicator
    from dpcore.comm.communicators.work import Work

_COUNTERPARTS = {"send": "recv", "recv": "send"}


class CupyCommunicator(OtherNames):
    """A group of ranks over ``cupy.cuda.nccl``. Made by ``dpcore.init(backend="cupy")``."""

    _capabilities: ClassVar[Capabilities] = Capabilities()
    backend = "cupy"

    def __init__(self, control: Communicator, nccl: Any, device: Any, streams: Any) -> None:
        self._control, self._nccl, self._streams = control, nccl, streams
        self.device = device
        self.rank, self.world_size = control.rank, control.world_size
        identity = bytearray(packed(nccl.get_unique_id()) if self.rank == 0 else bytes(128))
        control.broadcast(identity, 0)
        self._comm = meet(nccl, self.world_size, bytes(identity), self.rank)

    # ---- collectives -------------------------------------------------------------------------

    def all_reduce(
        self, tensor: Any, op: Operator = "sum", *, async_op: bool = False, **options: Any
    ) -> CupyWork | None:
        """Combines ``tensor`` over all ranks, in place."""
        self._refuse(options)
        address, count, kind, operator = self._reduction(tensor, op)
        self._streams.begin()
        self._comm.allReduce(address, address, count, kind, operator, self._streams.address)
        return self._done(async_op, tensor)

    def reduce(
        self,
        tensor: Any,
        root: int = 0,
        op: Operator = "sum",
        *,
        async_op: bool = False,
        **options: Any,
    ) -> CupyWork | None:
        """Like ``all_reduce``, for ``root`` alone."""
        self._refuse(options)
        check_rank(root, self.world_size, "root")
        address, count, kind, operator = self._reduction(tensor, op)
        self._streams.begin()
        self._comm.reduce(address, address, count, kind, operator, root, self._streams.address)
        return self._done(async_op, tensor)

    def reduce_scatter(
        self,
        output: Any,
        input: Any,
        op: Operator = "sum",
        *,
        sizes: Sequence[int] | None = None,
        async_op: bool = False,
        **options: Any,
    ) -> CupyWork | None:
        """Leaves the r-th part of the combined ``input`` in rank r's ``output``; ``sizes``
        (elements) when parts differ."""
        self._refuse(options)
        source, count, kind, operator = self._reduction(input, op)
        target, _ = self._addresses(output, input)
        lengths = self._lengths(sizes, output, "output")
        expect(count, sum(lengths), "input")
        stream = self._streams.address
        self._streams.begin()
        if sizes is None:
            self._comm.reduceScatter(source, target, lengths[0], kind, operator, stream)
        else:
            with self._group():
                for root, address, part in self._parts(source, lengths, input):
                    self._comm.reduce(address, target, part, kind, operator, root, stream)
        return self._done(async_op, output, input)

    def broadcast(
        self, tensor: Any, root: int = 0, *, async_op: bool = False, **options: Any
    ) -> CupyWork | None:
        """Copies ``tensor`` of ``root`` to all."""
        self._refuse(options)
        check_rank(root, self.world_size, "root")
        address = self._address(tensor, "tensor")
        self._streams.begin()
        self._comm.broadcast(address, address, size_of(tensor), BYTES, root, self._streams.address)
        return self._done(async_op, tensor)

    def all_gather(
        self,
        output: Any,
        input: Any,
        *,
        sizes: Sequence[int] | None = None,
        async_op: bool = False,
        **options: Any,
    ) -> CupyWork | None:
        """Everybody's ``input``, one after the other; ``sizes`` (elements) when they differ."""
        self._refuse(options)
        target, source = self._addresses(output, input)
        lengths = self._lengths(sizes, input, "input")
        expect(output.numel(), sum(lengths), "output")
        stream = self._streams.address
        self._streams.begin()
        if sizes is None:
            self._comm.allGather(source, target, size_of(input), BYTES, stream)
        else:
            with self._group():
                for root, address, length in self._parts(target, lengths, output):
                    origin = source if root == self.rank else address
                    count = length * input.element_size()
                    self._comm.broadcast(origin, address, count, BYTES, root, stream)
        return self._done(async_op, output, input)

    def gather(
        self,
        output: Any | None,
        input: Any,
        root: int = 0,
        *,
        sizes: Sequence[int] | None = None,
        async_op: bool = False,
        **options: Any,
    ) -> CupyWork | None:
        """``all_gather`` for one rank: ``output`` is None on the others."""
        self._refuse(options)
        return self._with_root("send", input, "input", output, "output", root, sizes, async_op)

    def scatter(
        self,
        output: Any,
        input: Any | None,
        root: int = 0,
        *,
        sizes: Sequence[int] | None = None,
        async_op: bool = False,
        **options: Any,
    ) -> CupyWork | None:
        """Gives the r-th part of ``root``'s ``input`` to rank r; ``input`` is None elsewhere."""
        self._refuse(options)
        return self._with_root("recv", output, "output", input, "input", root, sizes, async_op)

    def all_to_all(
        self,
        output: Any,
        input: Any,
        *,
        output_sizes: Sequence[int] | None = None,
        input_sizes: Sequence[int] | None = None,
        async_op: bool = False,
        **options: Any,
    ) -> CupyWork | None:
        """The d-th part of ``input`` to rank d; not in place."""
        self._refuse(options)
        check_both(output_sizes, input_sizes)
        target, source = self._addresses(output, input)
        if input_sizes is None:
            expect(output.numel(), input.numel(), "output")
            if input.numel() % self.world_size:
                raise Unsupported(
                    f"all_to_all: {input.numel()} elements can't be cut into {self.world_size} "
                    "equal parts; pass output_sizes and input_sizes"
                )
        if target == source:
            raise Unsupported("all_to_all in place: backend='cupy' needs two tensors")
        each = input.numel() // self.world_size
        sends = lengths_of(input_sizes, each, self.world_size)
        takes = lengths_of(output_sizes, each, self.world_size)
        expect(input.numel(), sum(sends), "input")
        expect(output.numel(), sum(takes), "output")
        size, messages = input.element_size(), []
        ends = zip(accumulate(sends), accumulate(takes), strict=True)
        for peer, (sent, taken) in enumerate(ends):
            out, back = sends[peer], takes[peer]
            messages.append(("send", source + (sent - out) * size, out * size, peer))
            messages.append(("recv", target + (taken - back) * size, back * size, peer))
        self._exchange(messages)
        return self._done(async_op, output, input)

    def send(
        self, tensor: Any, dst: int, *, async_op: bool = False, **options: Any
    ) -> CupyWork | None:
        """To rank ``dst``."""
        self._refuse(options)
        check_peer(dst, self.rank, self.world_size)
        address = self._address(tensor, "tensor")
        self._streams.begin()
        self._comm.send(address, size_of(tensor), BYTES, dst, self._streams.address)
        return self._done(async_op, tensor)

    def recv(
        self, tensor: Any, src: int, *, async_op: bool = False, **options: Any
    ) -> CupyWork | None:
        """The next message of rank ``src``, of this size."""
        self._refuse(options)
        check_peer(src, self.rank, self.world_size)
        address = self._address(tensor, "tensor")
        self._streams.begin()
        self._comm.recv(address, size_of(tensor), BYTES, src, self._streams.address)
        return self._done(async_op, tensor)

    def barrier(self, *, async_op: bool = False, timeout: float = 0.0) -> Work | None:
        """Returns when every rank has called it; says nothing about work on the GPU."""
        return self._control.barrier(async_op=async_op, timeout=timeout)

    def empty(self, *shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """Ordinary memory of the device."""
        from dpcore.comm.communicators.torch_buffers import new_tensor

        return new_tensor(shape, dtype=dtype, device=self.device)

    def stats(self) -> dict[str, Any]:
        """Who carries the bytes, and where: CuPy counts nothing."""
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

    # ---- parts -------------------------------------------------------------------------------

    def _address(self, tensor: Any, role: str) -> int:
        if self._control.closed:
            raise Error(f"rank {self.rank}: this communicator was finalized; call init() again")
        if not hasattr(tensor, "data_ptr"):
            raise TypeError(f"expected a torch tensor, not {type(tensor).__name__}")
        if tensor.device != self.device:
            raise Unsupported(
                f"{role}: the tensor is on {tensor.device}, this communicator works on "
                f"{self.device}; move it with .to('{self.device}')"
            )
        if not tensor.is_contiguous():
            raise Unsupported(f"{role}: the tensor is not contiguous; pass .contiguous()")
        return int(tensor.data_ptr())

    def _addresses(self, output: Any, input: Any) -> tuple[int, int]:
        target, source = self._address(output, "output"), self._address(input, "input")
        if output.dtype != input.dtype:
            raise Unsupported(f"input is {input.dtype}, output is {output.dtype}")
        return target, source

    def _reduction(self, tensor: Any, op: Operator) -> tuple[int, int, int, int]:
        address = self._address(tensor, "tensor")
        return address, tensor.numel(), *numbers_of(operator_name(op), tensor.dtype)

    def _lengths(self, sizes: Sequence[int] | None, own: Any, role: str) -> list[int]:
        """Elements of each rank's part; ``own`` holds this rank's."""
        lengths = lengths_of(sizes, own.numel(), self.world_size)
        expect(own.numel(), lengths[self.rank], role)
        return lengths

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
                    getattr(self._comm, call)(address, count, BYTES, peer, self._streams.address)

    def _with_root(
        self,
        call: str,
        own: Any,
        own_role: str,
        whole: Any | None,
        whole_role: str,
        root: int,
        sizes: Sequence[int] | None,
        async_op: bool,
    ) -> CupyWork | None:
        """Each rank's ``own`` part is sent to, or received from, the ``whole`` that root has."""
        check_rank(root, self.world_size, "root")
        check_presence(whole, whole_role, self.rank, root)
        address, lengths = self._address(own, own_role), self._lengths(sizes, own, own_role)
        messages = [(call, address, size_of(own), root)]
        if whole is not None:
            begin, counterpart = self._addresses(whole, own)[0], _COUNTERPARTS[call]
            expect(whole.numel(), sum(lengths), whole_role)
            for rank, part, length in self._parts(begin, lengths, whole):
                messages.append((counterpart, part, length * whole.element_size(), rank))
        self._exchange(messages)
        return self._done(async_op, *(tensor for tensor in (whole, own) if tensor is not None))

    def _refuse(self, options: dict[str, Any]) -> None:
        refuse(options, "backend='cupy'", "; use backend='nccl'")

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


if TYPE_CHECKING:
    _keeps_the_contract: type[Collectives] = CupyCommunicator
