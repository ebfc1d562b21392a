"""dpcore itself: with tensors in the arena, with ordinary tensors, and without Python."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from dpcore.tools.compare.collectives.cells import ROOT, Cell
from dpcore.tools.compare.collectives.workers.backend import (
    CollectiveBackend,
    Operation,
    Place,
    Prepared,
    UnsupportedError,
    ordinary_memory,
    pingpong,
)
from dpcore.tools.compare.collectives.workers.layout import Numbers

try:
    import dpcore
except ImportError as error:
    raise ImportError(f"dpcore not importable: {error}") from error

dp: Any = dpcore  # lazy: what it offers is found at run time


class DpcoreBackend(CollectiveBackend):
    def __init__(self, comm: Any) -> None:
        self.comm = comm
        self.rank, self.world = comm.rank, comm.world_size
        self._seen: Any = comm.stats()

    @classmethod
    def at(cls, place: Place, transport: str) -> DpcoreBackend:
        torch.set_num_threads(1)
        unix = f"unix://{place.job.strip('/').replace('/', '-')}"
        try:
            comm = dp.init(
                init_method=os.environ.get("BENCH_MEETING", unix),
                rank=place.rank,
                world_size=place.world,
                transport=transport,
            )
        except (ImportError, AttributeError) as error:  # the package is there, its build is not
            raise ImportError(f"dpcore not importable: {error}") from error
        return cls(comm)

    def versions(self) -> dict[str, str]:
        return {"torch": torch.__version__, "dpcore": str(getattr(dp, "__version__", "unknown"))}

    def empty(self, variant: str, dtype: str, elements: int) -> torch.Tensor:
        kind: torch.dtype = getattr(torch, dtype)
        if variant == "arena":
            tensor: torch.Tensor = self.comm.empty((elements,), dtype=kind)
            return tensor
        return torch.from_numpy(ordinary_memory(elements, dtype)).view(kind)

    def view(self, buffer: torch.Tensor) -> Numbers:
        bits = buffer.view(torch.uint16) if buffer.dtype == torch.bfloat16 else buffer
        view: Numbers = bits.numpy()
        return view

    def barrier(self) -> None:
        self.comm.barrier()

    def close(self) -> None:
        dp.finalize()

    def facts(self) -> dict[str, Any]:
        now = self.comm.stats()
        since, self._seen = _difference(now, self._seen), now
        return {"stats": since}

    def prepare(self, variant: str, cell: Cell) -> Prepared:
        if variant == "cpp":
            return self._prepare_loop_in_cpp(cell)
        memory, _, algorithm = variant.partition(" ")
        return super().prepare(memory, replace(cell, algorithm=algorithm or cell.algorithm))

    def _prepare_loop_in_cpp(self, cell: Cell) -> Prepared:
        loop = getattr(self.comm, "_latency_loop", None)
        if loop is None or cell.collective != "all_reduce":
            raise UnsupportedError("no loop inside C++")
        return Prepared(lambda iterations: float(loop(cell.bytes, iterations)))

    def operation(self, cell: Cell, send: Any, receive: Any) -> Operation:
        comm = self.comm
        by = {} if cell.algorithm == "auto" else {"algorithm": cell.algorithm}
        match cell.collective:
            case "all_reduce":
                return partial(comm.all_reduce, send, cell.op, **by)
            case "reduce_scatter":
                return partial(comm.reduce_scatter, receive, send, cell.op, **by)
            case "all_gather":
                return partial(comm.all_gather, receive, send, **by)
            case "broadcast":
                return partial(comm.broadcast, send, ROOT, **by)
            case "reduce":
                return partial(comm.reduce, send, ROOT, cell.op, **by)
            case "gather":
                return partial(comm.gather, receive, send, ROOT, **by)
            case "scatter":
                return partial(comm.scatter, receive, send, ROOT, **by)
            case "all_to_all":
                return partial(comm.all_to_all, receive, send, **by)
            case "barrier":
                return partial(comm.barrier)
            case "send_recv":
                return pingpong(
                    self.rank, self.world, partial(comm.send, send), partial(comm.recv, send)
                )
        raise UnsupportedError(cell.collective)


def _difference(now: Any, before: Any) -> Any:
    """Counters only grow: what one cell added, in the same shape, without what stood still."""
    if isinstance(now, dict):
        known = before if isinstance(before, dict) else {}
        inner = {key: _difference(value, known.get(key)) for key, value in now.items()}
        return {key: value for key, value in inner.items() if value not in (0, {})}
    if isinstance(now, (int, float)) and not isinstance(now, bool):
        return now - before if isinstance(before, (int, float)) else now
    return now
