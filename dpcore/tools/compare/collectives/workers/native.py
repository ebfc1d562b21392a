"""dpcore itself: with tensors in the arena, with ordinary tensors, and without Python."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch

from dpcore.tools.compare.collectives.workers.backend import (
    CollectiveBackend,
    Operation,
    Place,
    Prepared,
    UnsupportedError,
    ordinary_memory,
    pingpong,
)
from dpcore.tools.compare.collectives.workers.layout import ROOT

try:
    import dpcore
except ImportError as error:
    raise ImportError(f"dpcore not importable: {error}") from error

dp: Any = dpcore  # lazy: what it offers is found at run time

ELEMENT_BYTES = 4


class DpcoreBackend(CollectiveBackend):
    def __init__(self, place: Place, transport: str = "auto") -> None:
        torch.set_num_threads(1)
        unix = f"unix://{place.job.strip('/').replace('/', '-')}"
        try:
            self.comm: Any = dp.init(
                init_method=os.environ.get("BENCH_MEETING", unix),
                rank=place.rank,
                world_size=place.world,
                transport=transport,
            )
        except (ImportError, AttributeError) as error:  # the package is there, its build is not
            raise ImportError(f"dpcore not importable: {error}") from error
        self.rank, self.world = place.rank, place.world
        self._seen: Any = self.comm.stats()

    def versions(self) -> dict[str, str]:
        return {"torch": torch.__version__, "dpcore": str(getattr(dp, "__version__", "unknown"))}

    def empty(self, variant: str, elements: int) -> torch.Tensor:
        if variant == "arena":
            tensor: torch.Tensor = self.comm.empty((elements,), dtype=torch.float32)
            return tensor
        return torch.from_numpy(ordinary_memory(elements))

    def barrier(self) -> None:
        self.comm.barrier()

    def close(self) -> None:
        dp.finalize()

    def facts(self) -> dict[str, Any]:
        now = self.comm.stats()
        since, self._seen = _difference(now, self._seen), now
        return {"stats": since}

    def prepare(self, variant: str, collective: str, elements: int) -> Prepared:
        if variant == "cpp":
            return self._prepare_loop_in_cpp(collective, elements)
        return super().prepare(variant, collective, elements)

    def _prepare_loop_in_cpp(self, collective: str, elements: int) -> Prepared:
        loop = getattr(self.comm, "_latency_loop", None)
        if loop is None or collective != "all_reduce":
            raise UnsupportedError("no loop inside C++")
        return Prepared(lambda iterations: float(loop(elements * ELEMENT_BYTES, iterations)))

    def operation(self, collective: str, send: Any, receive: Any) -> Operation:
        comm = self.comm
        match collective:
            case "all_reduce":
                return partial(comm.all_reduce, send, op="sum")
            case "reduce_scatter":
                return partial(comm.reduce_scatter, receive, send)
            case "all_gather":
                return partial(comm.all_gather, receive, send)
            case "broadcast":
                return partial(comm.broadcast, send, root=ROOT)
            case "reduce":
                return partial(comm.reduce, send, root=ROOT, op="sum")
            case "gather":
                return partial(comm.gather, receive, send, root=ROOT)
            case "scatter":
                return partial(comm.scatter, receive, send, root=ROOT)
            case "all_to_all":
                return partial(comm.all_to_all, receive, send)
            case "barrier":
                return partial(comm.barrier)
            case "send_recv":
                return pingpong(
                    self.rank, self.world, partial(comm.send, send), partial(comm.recv, send)
                )
        raise UnsupportedError(collective)


def _difference(now: Any, before: Any) -> Any:
    """Counters only grow: what one cell added, in the same shape, without what stood still."""
    if isinstance(now, dict):
        known = before if isinstance(before, dict) else {}
        inner = {key: _difference(value, known.get(key)) for key, value in now.items()}
        return {key: value for key, value in inner.items() if value not in (0, {})}
    if isinstance(now, (int, float)) and not isinstance(now, bool):
        return now - before if isinstance(before, (int, float)) else now
    return now
