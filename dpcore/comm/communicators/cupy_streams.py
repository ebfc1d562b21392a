"""The stream of ``backend="cupy"`` and an operation in it: what waits, and what is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dpcore.errors import Unsupported

if TYPE_CHECKING:
    import torch


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

    def keep(self, tensors: Sequence[Any]) -> None:
        """Their memory goes to nothing else before the stream is behind what it holds now."""
        for tensor in tensors:
            tensor.record_stream(self._stream)


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
