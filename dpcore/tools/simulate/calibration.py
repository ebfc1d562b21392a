"""What ``dpcore calibrate`` has measured, as the simulator's processors and links.

    calibration = calibrated()                    this user's file, or one by its path
    Network(8, links, "auto", calibration.processors)
    calibration.network                           the link between its hosts, if that was measured

A file of another machine serves as well: it is that machine's job that is predicted.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpcore.base.link import Speed
from dpcore.comm.communicators.costs import Costs, Way, cache_file, measured
from dpcore.errors import Unsupported
from dpcore.tools.simulate.choice import DEFAULT_COSTS
from dpcore.tools.simulate.links import FIRST_WINDOW, Links
from dpcore.tools.simulate.processors import Processors

_NEEDED = (
    "memory", "added_byte", "operation", "memory_operation", "message", "tcp_message", "wake",
    "busy_wake", "copied_byte", "reduced_byte", "fused_byte", "tcp_byte", "update_call",
)  # fmt: skip


@dataclass(frozen=True)
class Calibration:
    """``network``: None where no launcher has started ranks on several hosts to measure it."""

    processors: Processors
    network: Links | None
    source: str


def calibrated(path: Path | None = None) -> Calibration:
    """From a file of ``dpcore calibrate``; without a path, the one in this user's cache."""
    found, cores = measured(path)
    where = str(path or cache_file())
    if missing := [name for name in _NEEDED if name not in found]:
        raise Unsupported(
            f"{where} has no {', '.join(missing)}: measure this machine with dpcore calibrate, "
            "without a launcher"
        )
    memory = Way(*found["memory"])
    way = Way(*found["network"]) if "network" in found else DEFAULT_COSTS.network
    (added,) = found["added_byte"]
    costs: dict[str, Any] = {name: found[name][0] for name in _NEEDED[2:]}
    processors = Processors(cores=cores, costs=Costs(memory, way, added, where), **costs)
    if "network" not in found:
        return Calibration(processors, None, where)
    rate = 1 / way.byte if way.byte else 0.0
    # Measured were bytes of payload, so there is no header left to count.
    ramps = found.get("after_pause", [0.0])[0] > way.step
    window = FIRST_WINDOW if ramps else 0
    network = Links(Speed(rate, way.step), first_window=window, is_tcp=True)
    return Calibration(processors, network, where)
