"""Communicators for tensors on GPUs: the methods of ``Communicator``, in the order of streams.

    comm = dpcore.init(backend="nccl")                    # this rank's torch.cuda.current_device()
    comm.all_reduce(gradient, op="mean")                  # returns at once
    work = comm.all_reduce(gradient, async_op=True)
    ...                                                   # runs beside it
    work.wait()                                           # the stream waits, the program does not

A call is ordered after what this thread has given to torch's current stream, and what comes after
``wait()`` (or after a call without ``async_op``) is ordered after the result. Nothing waits for the
GPU but ``barrier()``, ``wait(timeout=...)`` and torch's own synchronisation. Errors of other ranks
are raised by the next call.

Beside it there is a communicator on the host over the same ranks: they meet over it, and it knows
who is alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from dpcore.base.user_code import is_own
from dpcore.comm.communicators.cupy_nccl import start_cupy
from dpcore.comm.communicators.native import Communicator
from dpcore.comm.communicators.nccl import wheel_libraries
from dpcore.comm.communicators.protocol import Capabilities
from dpcore.comm.communicators.work import Work
from dpcore.errors import Unsupported

if TYPE_CHECKING:
    import torch

    from dpcore import _C

Message = tuple[Any, int]  # a tensor and the other rank


class DeviceCommunicator(Communicator):
    """A group of ranks with a GPU each. Made by ``dpcore.init(backend=...)`` or ``split()``."""

    _capabilities: ClassVar[Capabilities] = Communicator._capabilities._replace(on_processors=False)
    _native: _C.StreamCommunicator

    def __init__(self, native: _C.StreamCommunicator, transport: str) -> None:
        super().__init__(native)
        self._transport = transport

    def _beside(self, native: Any) -> Communicator:
        return DeviceCommunicator(native, self._transport)

    @property
    def _on_host(self) -> Communicator:
        return Communicator(self._native.control)

    def exchange(
        self,
        sends: Sequence[Message] = (),
        receives: Sequence[Message] = (),
        *,
        async_op: bool = False,
        timeout: float = 0.0,
    ) -> Work | None:
        """Sends and receives that travel at the same time, where one after the other two ranks
        would wait for each other.

        >>> comm.exchange(sends=[(x, right)], receives=[(y, left)])     # doctest: +SKIP
        """
        messages = [(True, tensor, peer) for tensor, peer in sends]
        messages += [(False, tensor, peer) for tensor, peer in receives]
        native = self._native.messages(messages, timeout, async_op)
        return None if native is None else Work(native, [tensor for tensor, _ in receives])

    def empty(self, *shape: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor on the device, contents as they are.

        With ``backend="cuda"`` all ranks call it alike: the memory is mapped by all of them, and
        collectives on it (at the same place on every rank) move no extra byte.
        """
        return super().empty(*shape, dtype=dtype)

    def stats(self) -> dict[str, Any]:
        """What carries the bytes: backend, library and device; how often operations took which
        path, where there are several."""
        native = self._native
        return {
            "backend": native.backend,
            "library": native.library,
            "device": native.device,
            "paths": native.paths(),
        }

    @property
    def transport(self) -> str:
        """How the ranks met, see ``Communicator.transport``."""
        return self._transport

    @property
    def backend(self) -> str:
        """Who moves the bytes: ``"nccl"`` or ``"cuda"``."""
        return self._native.backend

    @property
    def device(self) -> torch.device:
        """Where its tensors have to be."""
        import torch

        name = self._native.device
        return torch.device("cpu" if name == "host" else name)

    @property
    def _place(self) -> str:
        return f"{self.backend} on {self._native.device}"


def on_device(
    control: Communicator,
    backend: str,
    device: Any,
    *,
    timeout: float,
    algorithm: Any,
    deterministic: bool,
    host_uuid: str | None = None,
) -> Any:
    """A communicator for a device over the ranks of ``control``, which it takes over. "auto": NCCL
    where every rank has a GPU of its own, otherwise "cuda". ``host_uuid`` is for tests: a device
    of the host that has it."""
    from dpcore import _C

    own = is_own(algorithm)
    try:
        name = _name_of(device, backend) if host_uuid is None else "host"
        if backend == "cupy":
            import torch

            if algorithm != "auto" or deterministic:
                raise Unsupported("backend='cupy' has no algorithms to choose from; use 'nccl'")
            return start_cupy(control, torch.device(name))
        native = _C.start_on_device(
            control._native,
            name,
            timeout,
            "auto" if own else algorithm,
            deterministic,
            wheel_libraries(),
            backend,
            host_uuid or "",
        )
        made = DeviceCommunicator(native, control.transport)
        if own:
            made._run_by_default(algorithm)
        return made
    except BaseException:
        control.close()
        raise


def _name_of(device: Any, backend: str) -> str:
    """ "cuda:1" of whatever torch takes for a device; None is torch's current one."""
    import torch

    try:
        wanted = torch.device("cuda" if device is None else device)
    except (RuntimeError, TypeError, ValueError):  # in torch's words for its own callers
        raise Unsupported(
            f"device {device!r}: torch knows no such device here; pass 'cuda:0', or leave it out "
            "for the current one"
        ) from None
    if wanted.type != "cuda":
        raise Unsupported(
            f"device {wanted}: backend={backend!r} is for GPUs; leave it out for tensors on the CPU"
        )
    if ":" in str(wanted):
        return str(wanted)
    return f"cuda:{torch.cuda.current_device() if torch.cuda.is_available() else 0}"
