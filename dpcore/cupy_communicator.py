"""``backend="cupy"``: NCCL as CuPy holds it, on torch's CUDA tensors.

For programs that have CuPy's communicator anyway, and to compare. Each call goes from Python to
``cupy.cuda.nccl.NcclCommunicator`` with addresses and a stream; ``backend="nccl"`` does the same
from C++, without the GIL, watches for ranks that are gone, and has more algorithms. Here a rank
that does not come is noticed by whoever synchronises with the GPU.

Order is kept as there: work goes to a stream of its own, after what the current stream holds, and
``wait()`` puts what comes next behind it. Tensors stay alive until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dpcore.errors import Error, Unsupported

if TYPE_CHECKING:
    import torch

    from dpcore.communicator import Communicator

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


class TorchStreams:
    """The communication stream, and how torch's current one and it wait for each other."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]

    @property
    def address(self) -> int:
        """The cudaStream_t as a number."""
        return int(self._stream.cuda_stream)

    def begin(self) -> None:
        """What follows waits for what the current stream holds."""
        import torch

        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def end(self) -> Any:
        """An event that happens when all so far is done."""
        return self._stream.record_event()

    def wait(self, event: Any) -> None:
        """The current stream waits for the event, the caller does not."""
        import torch

        torch.cuda.current_stream(self._device).wait_event(event)


class CupyWork:
    """An operation in flight."""

    def __init__(self, streams: Any, event: Any, tensors: Sequence[Any]) -> None:
        self._streams, self._event, self._tensors = streams, event, tensors

    def wait(self, timeout: float | None = None) -> None:
        """Orders what comes next behind it. Refuses a ``timeout``: CuPy can't be stopped."""
        if timeout:
            raise Unsupported("backend='cupy' has no deadlines; use backend='nccl'")
        self._streams.wait(self._event)
        self._tensors = ()

    def is_completed(self) -> bool:
        """Whether the GPU has done it."""
        return bool(self._event.query())


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
        self, output: Any, input: Any, op: str = "sum", *, async_op: bool = False
    ) -> CupyWork | None:
        """Leaves the r-th part of the combined ``input`` in rank r's ``output``."""
        source, count, kind, operator = self._reduction(input, op)
        target = self._address(output, "output")
        self._expect(count, output.numel() * self.world_size, "input")
        self._streams.begin()
        self._comm.reduceScatter(
            source, target, output.numel(), kind, operator, self._streams.address
        )
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
        lengths = [input.numel()] * self.world_size if sizes is None else list(sizes)
        self._expect(output.numel(), sum(lengths), "output")
        self._expect(input.numel(), lengths[self.rank], "input")
        stream = self._streams.address
        self._streams.begin()
        if sizes is None:
            self._comm.allGather(source, target, _size_of(input), _BYTES, stream)
        else:
            self._nccl.groupStart()
            for root, length in enumerate(lengths):
                count = length * input.element_size()
                origin = source if root == self.rank else target
                self._comm.broadcast(origin, target, count, _BYTES, root, stream)
                target += count
            self._nccl.groupEnd()
        return self._done(async_op, output, input)

    def all_to_all(self, output: Any, input: Any, *, async_op: bool = False) -> CupyWork | None:
        """The d-th part of ``input`` to rank d; not in place."""
        target, source = self._address(output, "output"), self._address(input, "input")
        self._expect(output.numel(), input.numel(), "output")
        self._expect(input.numel() % self.world_size, 0, "the rest of input divided by the world")
        if target == source:
            raise Unsupported("all_to_all in place: backend='cupy' needs two tensors")
        part = _size_of(input) // self.world_size
        stream = self._streams.address
        self._streams.begin()
        self._nccl.groupStart()
        for peer in range(self.world_size):
            self._comm.send(source + peer * part, part, _BYTES, peer, stream)
            self._comm.recv(target + peer * part, part, _BYTES, peer, stream)
        self._nccl.groupEnd()
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
        is_mean = op in ("mean", "avg")
        if (
            name not in _TYPES
            or operator is None
            or (is_mean and not tensor.dtype.is_floating_point)
        ):
            raise Unsupported(
                f"{op} of {name} is nothing that NCCL can do through CuPy; use backend='nccl'"
            )
        return self._address(tensor, "tensor"), tensor.numel(), _TYPES[name], operator

    def _expect(self, have: int, want: int, role: str) -> None:
        if have != want:
            raise Unsupported(f"{role} has {have} elements, {want} are needed")

    def _done(self, async_op: bool, *tensors: Any) -> CupyWork | None:
        work = CupyWork(self._streams, self._streams.end(), tensors)
        if async_op:
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
