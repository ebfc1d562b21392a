"""Reading a result on the host."""

from __future__ import annotations

from typing import Any

import torch


def numbers_in(result: torch.Tensor, group: Any) -> list[Any]:
    """``result.tolist()``, where ``result`` is that of an operation of ``group``."""
    _settle(result, group)
    return result.tolist()


def on_host(result: torch.Tensor, group: Any) -> torch.Tensor:
    """The same as a tensor in memory of the host."""
    _settle(result, group)
    return result.cpu()


def _settle(result: torch.Tensor, group: Any) -> None:
    """On a GPU its stream is waited for. A copy to ordinary memory would wait as well, but within
    the driver, which then lets no other thread of the process allocate: ranks that are threads
    would wait for each other. What a failed operation has left is not read: the failure is raised.
    """
    if result.is_cuda:
        torch.cuda.current_stream(result.device).synchronize()
        native = getattr(group, "_native", None)
        if native is not None and native.failed:
            group.barrier()  # raises it
