"""What the times of steps are read from: the host's clock, or events in a GPU's stream.

On the CPU calls are synchronous, so all ranks begin a step together and its end is when it returns.
A GPU is given a whole turn of steps without a pause, as in training: a pause would show how long
the host needs to call a step, and not what a step takes. Only the first one begins together.
"""

from __future__ import annotations

import time
from typing import Any

import torch


class HostClock:
    """For steps on the CPU."""

    begins_together = True  # every step

    def mark(self) -> Any:
        """This moment, for ``seconds``."""
        return time.perf_counter()

    def seconds(self, begin: Any, end: Any) -> float:
        """Between two marks, once ``settle`` has been called."""
        between: float = end - begin
        return between

    def settle(self) -> None:
        """Waits until all marks have happened."""

    def held_bytes(self) -> int:
        """What is allocated now. Only a GPU's allocator counts it."""
        return 0

    def peak_bytes(self) -> int:
        """The most that was allocated at a time since the last call."""
        return 0


class DeviceClock:
    """For steps on a GPU, in torch's current stream."""

    begins_together = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # cuBLAS allocates when it is first used in a thread: that is no contender's memory.
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.ones(64, 64, device=device, dtype=dtype, requires_grad=True)
            torch.autograd.backward((x @ x).sum())
        self.peak_bytes()

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds * 1e-3

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)

    def held_bytes(self) -> int:
        self.settle()
        return torch.cuda.memory_allocated(self._device)

    def peak_bytes(self) -> int:
        peak = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak


Clock = HostClock | DeviceClock


def clock_of(device: torch.device) -> Clock:
    return DeviceClock(device) if device.type == "cuda" else HostClock()
