"""How much of the communication of training is hidden? ``measure_overlap`` runs it and says.

Two things hide it badly. *Exposed* is the time in which the computing thread sits in a wait for
communication. *Slowdown* is not seen by looking at waits: communication takes processor time and
memory bandwidth from the computation beside it, all the more when ranks have few cores.

    overlap = 1 - (exposed + slowdown) / communication

1 is communication that costs nothing; 0 is the cost of doing it all after backward.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dpcore.communicator import Communicator
from dpcore.data_parallel import DataParallel
from dpcore.errors import Unsupported
from dpcore.tracing import Trace, trace


@dataclass(frozen=True)
class Overlap:
    """Milliseconds per step on this rank, medians."""

    step_ms: float  # forward and backward with communication
    alone_ms: float  # without, all ranks computing at once
    communication_ms: float  # at least one operation in flight
    exposed_ms: float

    @property
    def slowdown_ms(self) -> float:
        """What computing takes longer because of the communication beside it."""
        return self.step_ms - self.exposed_ms - self.alone_ms

    @property
    def overlap(self) -> float:
        """The share of the communication that costs no time."""
        if self.communication_ms == 0:
            return 1.0
        return 1.0 - (self.exposed_ms + self.slowdown_ms) / self.communication_ms


def measure_overlap(model: DataParallel, step: Callable[[], Any], steps: int = 10) -> Overlap:
    """Runs ``step`` with and without communication in turn, on all ranks.

    ``step`` does forward and backward, and no optimizer step: half of its gradients are not
    averaged. Gradients are dropped before each.

    >>> dpcore.measure_overlap(model, lambda: loss(model(x)).backward())     # doctest: +SKIP
    Overlap(step_ms=41.2, alone_ms=37.5, communication_ms=9.6, exposed_ms=1.1)
    """
    group = model.group
    if not isinstance(group, Communicator):
        raise Unsupported(
            f"measure_overlap: {model.backend} does not record what it does; wrap the model with "
            "comm=dpcore.init()"
        )

    def run() -> tuple[float, Trace]:
        model.zero_grad()
        group.barrier()
        with trace(comm=group) as recorded:
            begin = time.perf_counter()
            step()
            ms = (time.perf_counter() - begin) * 1e3
        return ms, recorded

    for _ in range(2):  # buckets are rebuilt in the second
        run()
    with_it, without, in_flight, exposed = [], [], [], []
    for _ in range(steps):
        ms, recorded = run()
        with_it.append(ms)
        in_flight.append(recorded.communication_ms)
        exposed.append(recorded.exposed_ms)
        with model.no_sync():
            ms, _ = run()
        without.append(ms)
    model.zero_grad()
    return Overlap(*(statistics.median(times) for times in (with_it, without, in_flight, exposed)))
