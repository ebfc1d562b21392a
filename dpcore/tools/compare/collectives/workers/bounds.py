"""What the memory of this machine allows when every rank works at once and none communicates.

`scale` reads and writes S bytes in place, like a two-shot in the arena; `memcpy` reads S and writes
S elsewhere, like the copy into shared memory that an ordinary tensor needs at the least.
"""

from __future__ import annotations

import ctypes
from functools import partial
from time import monotonic, sleep

import numpy as np
import torch

from dpcore.tools.compare.collectives.cells import Cell
from dpcore.tools.compare.collectives.workers.backend import (
    Backend,
    Place,
    Prepared,
    UnsupportedError,
    ordinary_memory,
    python_loop,
)


class BoundsBackend(Backend):
    def __init__(self, place: Place) -> None:
        torch.set_num_threads(1)
        self.rank, self.world = place.rank, place.world

    def versions(self) -> dict[str, str]:
        return {"torch": torch.__version__, "numpy": np.__version__}

    def synchronise(self, start_at: float) -> None:
        # Ranks that share nothing meet at an instant: the monotonic clock is one for the machine.
        sleep(max(0.0, start_at - monotonic()))

    def close(self) -> None:
        pass

    def prepare(self, variant: str, cell: Cell) -> Prepared:
        if cell.collective == "barrier":
            raise UnsupportedError("a barrier moves no data")
        data = ordinary_memory(cell.elements, cell.dtype)
        data.fill(0.0)
        if variant == "scale":
            return Prepared(python_loop(partial(torch.from_numpy(data).mul_, 0.5)))
        target = ordinary_memory(cell.elements, cell.dtype)
        target.fill(0.0)
        memcpy = ctypes.CDLL(None).memcpy
        arguments = (
            ctypes.c_void_p(target.ctypes.data),
            ctypes.c_void_p(data.ctypes.data),
            ctypes.c_size_t(data.nbytes),
        )
        loop = python_loop(partial(memcpy, *arguments))

        def copies_while_alive(iterations: int, _owners: object = (data, target)) -> float:
            return loop(iterations)  # memcpy knows addresses only; the default argument owns them

        return Prepared(copies_while_alive)
