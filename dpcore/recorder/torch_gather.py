"""Bytes of all ranks on the first one, over a process group of torch.

torch's gather_object() would do, but for how it ends over Gloo. A thread of Gloo's lets go of the
tensors some time after the call has returned, and needs Python's lock for that. Should the program
end in between, Python ends that thread instead, and with it the process ("terminate called without
an active exception"). So these tensors are waited for.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

_PATIENCE_SECONDS = 1.0


def gather_bytes(mine: bytes, group: Any) -> list[bytes]:
    """In the order of the ranks; nothing on the other ranks. All of them call it."""
    import torch
    import torch.distributed as dist

    takes_cpu = "cpu:" in dist.get_backend_config(group)
    device = torch.device("cpu" if takes_cpu else f"cuda:{torch.cuda.current_device()}")
    first = dist.get_global_rank(group, 0)
    size = torch.tensor([len(mine)], device=device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    data = torch.zeros(max(int(one) for one in sizes), dtype=torch.uint8, device=device)
    data[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)
    parts = [torch.empty_like(data) for _ in sizes] if dist.get_rank(group) == 0 else []
    dist.gather(data, parts or None, dst=first, group=group)
    gathered = [
        part[: int(one)].cpu().numpy().tobytes() for part, one in zip(parts, sizes, strict=False)
    ]
    _wait_until_free([size, *sizes, data, *parts])
    return gathered


def _wait_until_free(tensors: Iterable[Any]) -> None:
    """Until nobody but the caller holds them."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    for tensor in tensors:
        while tensor._use_count() > 1 and time.monotonic() < deadline:
            time.sleep(1e-4)
