"""torch.distributed over Gloo, called the way its users call it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from dpcore.tools.compare.collectives.cells import ROOT, Cell
from dpcore.tools.compare.collectives.workers.backend import (
    CollectiveBackend,
    Operation,
    Place,
    UnsupportedError,
    ordinary_memory,
    pingpong,
)


class GlooBackend(CollectiveBackend):
    def __init__(self, place: Place) -> None:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", init_method=f"file://{place.job}.store", rank=place.rank, world_size=place.world
        )
        self.rank, self.world = place.rank, place.world

    def versions(self) -> dict[str, str]:
        return {"torch": torch.__version__}

    def empty(self, variant: str, dtype: str, elements: int) -> torch.Tensor:
        return torch.from_numpy(ordinary_memory(elements, dtype))

    def barrier(self) -> None:
        dist.barrier()

    def close(self) -> None:
        dist.destroy_process_group()

    def operation(self, cell: Cell, send: Any, receive: Any) -> Operation:
        root = self.rank == ROOT
        match cell.collective:
            case "all_reduce":
                return partial(dist.all_reduce, send)
            case "reduce_scatter":
                return partial(dist.reduce_scatter_tensor, receive, send)
            case "all_gather":
                return partial(dist.all_gather_into_tensor, receive, send)
            case "broadcast":
                return partial(dist.broadcast, send, ROOT)
            case "reduce":
                return partial(dist.reduce, send, ROOT)
            case "gather":
                parts = list(receive.chunk(self.world)) if root else None
                return partial(dist.gather, send, parts, ROOT)
            case "scatter":
                parts = list(send.chunk(self.world)) if root else None
                return partial(dist.scatter, receive, parts, ROOT)
            case "all_to_all":
                return partial(dist.all_to_all_single, receive, send)
            case "barrier":
                return dist.barrier
            case "send_recv":
                return pingpong(
                    self.rank, self.world, partial(dist.send, send), partial(dist.recv, send)
                )
        raise UnsupportedError(cell.collective)
