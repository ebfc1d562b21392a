"""dpcore: collective communication and data parallel training that you can read and see.

    import dpcore as dp

    comm = dp.init()
    comm.all_reduce(tensor, op="mean")

Importing this package loads neither torch nor the compiled core; both come with ``init()``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dpcore._version import __version__
from dpcore.errors import Error, Mismatch, PeerLost, RendezvousError, Timeout, Unsupported

if TYPE_CHECKING:
    from dpcore._C import (
        Schedule,
        algorithms_of,
        check_schedule,
        schedule,
        schedule_cost,
    )
    from dpcore._ddp.comm_hooks import compose_comm_hooks
    from dpcore.collectives import (
        all_gather,
        all_reduce,
        all_to_all,
        barrier,
        broadcast,
        gather,
        recv,
        reduce,
        reduce_scatter,
        scatter,
        send,
    )
    from dpcore.communicator import Communicator
    from dpcore.data_parallel import DataParallel
    from dpcore.launch_schedule import LaunchSchedule
    from dpcore.overlap import measure_overlap
    from dpcore.ranks import spawn
    from dpcore.session import current, finalize, init
    from dpcore.tracing import trace
    from dpcore.work import Work

_COLLECTIVES = (
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
)

# Where each public name lives. Read by __getattr__ at first use.
_HOME = {
    **dict.fromkeys(
        (
            "Schedule",
            "algorithms_of",
            "check_schedule",
            "schedule",
            "schedule_cost",
        ),
        "dpcore._C",
    ),
    **dict.fromkeys(_COLLECTIVES, "dpcore.collectives"),
    **dict.fromkeys(("current", "finalize", "init"), "dpcore.session"),
    "Communicator": "dpcore.communicator",
    "DataParallel": "dpcore.data_parallel",
    "LaunchSchedule": "dpcore.launch_schedule",
    "Work": "dpcore.work",
    "compose_comm_hooks": "dpcore._ddp.comm_hooks",
    "measure_overlap": "dpcore.overlap",
    "spawn": "dpcore.ranks",
    "trace": "dpcore.tracing",
}

__all__ = [
    "Communicator",
    "DataParallel",
    "Error",
    "LaunchSchedule",
    "Mismatch",
    "PeerLost",
    "RendezvousError",
    "Schedule",
    "Timeout",
    "Unsupported",
    "Work",
    "__version__",
    "algorithms_of",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "check_schedule",
    "compose_comm_hooks",
    "current",
    "finalize",
    "gather",
    "init",
    "measure_overlap",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "schedule",
    "schedule_cost",
    "send",
    "spawn",
    "trace",
]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None and name != "_C":
        raise AttributeError(f"module 'dpcore' has no attribute {name!r}")
    if home is None or home == "dpcore._C":
        import torch  # noqa: F401  (the compiled module needs its libraries)

        home = "dpcore._C"
    module = importlib.import_module(home)
    value = module if name == "_C" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
