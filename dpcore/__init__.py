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
    from dpcore.communicators.native import Communicator
    from dpcore.communicators.work import Work
    from dpcore.ddp.data_parallel import DataParallel
    from dpcore.ddp.data_parallel import DataParallel as DistributedDataParallel
    from dpcore.ddp.launch_control import LaunchControl
    from dpcore.ddp.launch_schedule import LaunchSchedule
    from dpcore.ddp.overlap import Overlap, measure_overlap
    from dpcore.ddp.torch_face.comm_hooks import compose_comm_hooks
    from dpcore.functions import (
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
    from dpcore.launch.session import current, finalize, init
    from dpcore.launch.spawn import spawn
    from dpcore.local_updates.diloco import DiLoCo
    from dpcore.local_updates.local_sgd import LocalSGD
    from dpcore.noise_scale.measure import GradientNoiseScale, gradient_noise_scale
    from dpcore.optimizer.distributed import DistributedOptimizer
    from dpcore.parallel.mesh import mesh
    from dpcore.parallel.pipeline_plans import pipeline_plan
    from dpcore.recorder.recording import Trace, trace
    from dpcore.step_figures.monitor import Monitor, monitor

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

# Under torch's name as well, so that the import is all that a script for torch DDP changes.
_OTHER_NAMES = {"DistributedDataParallel": "DataParallel"}

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
    **dict.fromkeys(_COLLECTIVES, "dpcore.functions"),
    **dict.fromkeys(("current", "finalize", "init"), "dpcore.launch.session"),
    "Communicator": "dpcore.communicators.native",
    "DataParallel": "dpcore.ddp.data_parallel",
    "DistributedOptimizer": "dpcore.optimizer.distributed",
    "DiLoCo": "dpcore.local_updates.diloco",
    "GradientNoiseScale": "dpcore.noise_scale.measure",
    "LaunchControl": "dpcore.ddp.launch_control",
    "LaunchSchedule": "dpcore.ddp.launch_schedule",
    "LocalSGD": "dpcore.local_updates.local_sgd",
    "Monitor": "dpcore.step_figures.monitor",
    "Overlap": "dpcore.ddp.overlap",
    "Trace": "dpcore.recorder.recording",
    "Work": "dpcore.communicators.work",
    "compose_comm_hooks": "dpcore.ddp.torch_face.comm_hooks",
    "gradient_noise_scale": "dpcore.noise_scale.measure",
    "load_ipython_extension": "dpcore.notebook.extension",
    "measure_overlap": "dpcore.ddp.overlap",
    "mesh": "dpcore.parallel.mesh",
    "monitor": "dpcore.step_figures.monitor",
    "pipeline_plan": "dpcore.parallel.pipeline_plans",
    "spawn": "dpcore.launch.spawn",
    "trace": "dpcore.recorder.recording",
    "unload_ipython_extension": "dpcore.notebook.extension",
}

__all__ = [
    "Communicator",
    "DataParallel",
    "DiLoCo",
    "DistributedDataParallel",
    "DistributedOptimizer",
    "Error",
    "GradientNoiseScale",
    "LaunchControl",
    "LaunchSchedule",
    "LocalSGD",
    "Mismatch",
    "Monitor",
    "Overlap",
    "PeerLost",
    "RendezvousError",
    "Schedule",
    "Timeout",
    "Trace",
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
    "gradient_noise_scale",
    "init",
    "measure_overlap",
    "mesh",
    "monitor",
    "pipeline_plan",
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
    known_as = _OTHER_NAMES.get(name, name)
    home = "dpcore._C" if name == "_C" else _HOME.get(known_as)
    if home is None:
        from dpcore.communicators.words import meant_by

        meant = meant_by(name).partition("(")[0]
        hint = f"; it is called {meant_by(name)}" if meant in _HOME else ""
        raise AttributeError(f"module 'dpcore' has no attribute {name!r}{hint}")
    try:
        module = importlib.import_module(home)
    except ModuleNotFoundError as missing:
        if missing.name != "torch":
            raise
        from dpcore._core_choice import NoCore, without_torch

        raise NoCore(without_torch()) from None
    value = module if name == "_C" else getattr(module, known_as)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
