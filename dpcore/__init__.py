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

# Where the public names live. Read by __getattr__ at first use.
_HOMES = {
    "dpcore._C": "Schedule algorithms_of check_schedule schedule schedule_cost",
    "dpcore.communicators.native": "Communicator",
    "dpcore.communicators.work": "Work",
    "dpcore.ddp.data_parallel": "DataParallel",
    "dpcore.ddp.launch_control": "LaunchControl",
    "dpcore.ddp.launch_schedule": "LaunchSchedule",
    "dpcore.ddp.overlap": "Overlap measure_overlap",
    "dpcore.ddp.torch_face.comm_hooks": "compose_comm_hooks",
    "dpcore.functions": "all_gather all_reduce all_to_all barrier broadcast gather recv reduce "
    "reduce_scatter scatter send",
    "dpcore.launch.session": "current finalize init",
    "dpcore.launch.spawn": "spawn",
    "dpcore.local_updates.diloco": "DiLoCo",
    "dpcore.local_updates.local_sgd": "LocalSGD",
    "dpcore.noise_scale.measure": "GradientNoiseScale gradient_noise_scale",
    "dpcore.notebook.extension": "load_ipython_extension unload_ipython_extension",
    "dpcore.optimizer.distributed": "DistributedOptimizer",
    "dpcore.parallel.mesh": "mesh",
    "dpcore.parallel.pipeline_plans": "pipeline_plan",
    "dpcore.recorder.recording": "Trace trace",
    "dpcore.step_figures.monitor": "Monitor monitor",
}
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}

# Under torch's name as well, so that the import is all that a script for torch DDP changes.
_OTHER_NAMES = {"DistributedDataParallel": "DataParallel"}

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
