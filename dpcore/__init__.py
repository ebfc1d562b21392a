"""dpcore: collective communication and data parallel training that you can read and see.

    import dpcore as dp

    comm = dp.init()
    comm.all_reduce(tensor, op="mean")

Importing this package loads neither torch nor the compiled core; both come with ``init()``.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from dpcore._version import __version__
from dpcore.base import plugged_in
from dpcore.errors import (
    Error,
    Mismatch,
    MistakeWarning,
    PeerLost,
    RendezvousError,
    Timeout,
    Unsupported,
)

if TYPE_CHECKING:
    from dpcore._C import (
        Schedule,
        algorithms_of,
        check_schedule,
        schedule,
        schedule_cost,
    )
    from dpcore.comm.communicators.mpi.communicator import MpiCommunicator
    from dpcore.comm.communicators.native import Communicator
    from dpcore.comm.communicators.nccl import nccl_library
    from dpcore.comm.communicators.torch_group import TorchCommunicator
    from dpcore.comm.communicators.work import Work
    from dpcore.comm.launch.session import current, finalize, init
    from dpcore.comm.launch.spawn import spawn
    from dpcore.comm.launch.torch_backend import (
        BackendOptions,
        communicator_of,
        flight_record,
        write_flight_record,
    )
    from dpcore.ddp.across_steps.distributed import DistributedOptimizer
    from dpcore.ddp.check import CheckResult, check
    from dpcore.ddp.data_parallel import DataParallel
    from dpcore.ddp.data_parallel import DataParallel as DistributedDataParallel
    from dpcore.ddp.elastic.run import ElasticRun, elastic
    from dpcore.ddp.local_updates.diloco import DiLoCo
    from dpcore.ddp.local_updates.local_sgd import LocalSGD
    from dpcore.ddp.monitor import Monitor, monitor
    from dpcore.ddp.noise_scale import GradientNoiseScale, gradient_noise_scale
    from dpcore.ddp.overlap import Overlap, measure_overlap
    from dpcore.ddp.torch_face.comm_hooks import compose_comm_hooks
    from dpcore.ddp.warm_memory import warm_memory
    from dpcore.ddp.wrapper.launch_control import LaunchControl
    from dpcore.ddp.wrapper.launch_schedule import LaunchSchedule
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
    from dpcore.parallel.mesh import mesh
    from dpcore.parallel.pipeline_plans import pipeline_plan
    from dpcore.recorder.entry import trace
    from dpcore.recorder.recording import Trace

# Where the public names live. Read by __getattr__ at first use.
_HOMES = {
    "dpcore._C": "Schedule algorithms_of check_schedule schedule schedule_cost",
    "dpcore.comm.communicators.mpi.communicator": "MpiCommunicator",
    "dpcore.comm.communicators.native": "Communicator",
    "dpcore.comm.communicators.nccl": "nccl_library",
    "dpcore.comm.communicators.torch_group": "TorchCommunicator",
    "dpcore.comm.communicators.work": "Work",
    "dpcore.ddp.check": "CheckResult check",
    "dpcore.ddp.data_parallel": "DataParallel",
    "dpcore.ddp.elastic.run": "ElasticRun elastic",
    "dpcore.ddp.wrapper.launch_control": "LaunchControl",
    "dpcore.ddp.wrapper.launch_schedule": "LaunchSchedule",
    "dpcore.ddp.overlap": "Overlap measure_overlap",
    "dpcore.ddp.warm_memory": "warm_memory",
    "dpcore.ddp.torch_face.comm_hooks": "compose_comm_hooks",
    "dpcore.functions": "all_gather all_reduce all_to_all barrier broadcast gather recv reduce "
    "reduce_scatter scatter send",
    "dpcore.comm.launch.session": "current finalize init",
    "dpcore.comm.launch.spawn": "spawn",
    "dpcore.comm.launch.torch_backend": "BackendOptions communicator_of flight_record "
    "write_flight_record",
    "dpcore.ddp.local_updates.diloco": "DiLoCo",
    "dpcore.ddp.local_updates.local_sgd": "LocalSGD",
    "dpcore.ddp.noise_scale": "GradientNoiseScale gradient_noise_scale",
    "dpcore.school.notebook.extension": "load_ipython_extension unload_ipython_extension",
    "dpcore.ddp.across_steps.distributed": "DistributedOptimizer",
    "dpcore.parallel.mesh": "mesh",
    "dpcore.parallel.pipeline_plans": "pipeline_plan",
    "dpcore.recorder.entry": "trace",
    "dpcore.recorder.recording": "Trace",
    "dpcore.ddp.monitor": "Monitor monitor",
}
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}

# Under torch's name as well, so that the import is all that a script for torch DDP changes.
_OTHER_NAMES = {"DistributedDataParallel": "DataParallel"}

__all__ = [
    "BackendOptions",
    "CheckResult",
    "Communicator",
    "DataParallel",
    "DiLoCo",
    "DistributedDataParallel",
    "DistributedOptimizer",
    "ElasticRun",
    "Error",
    "GradientNoiseScale",
    "LaunchControl",
    "LaunchSchedule",
    "LocalSGD",
    "Mismatch",
    "MistakeWarning",
    "Monitor",
    "MpiCommunicator",
    "Overlap",
    "PeerLost",
    "RendezvousError",
    "Schedule",
    "Timeout",
    "TorchCommunicator",
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
    "check",
    "check_schedule",
    "communicator_of",
    "compose_comm_hooks",
    "current",
    "elastic",
    "finalize",
    "flight_record",
    "gather",
    "gradient_noise_scale",
    "init",
    "measure_overlap",
    "mesh",
    "monitor",
    "nccl_library",
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
    "warm_memory",
    "write_flight_record",
]


def __getattr__(name: str) -> Any:
    known_as = _OTHER_NAMES.get(name, name)
    home = "dpcore._C" if name == "_C" else _HOME.get(known_as)
    if home is None:
        from dpcore.comm.communicators.words import meant_by

        meant = meant_by(name).partition("(")[0]
        hint = f"; it is called {meant_by(name)}" if meant in _HOME else ""
        raise AttributeError(f"module 'dpcore' has no attribute {name!r}{hint}")
    try:
        module = importlib.import_module(home)
    except ModuleNotFoundError as missing:
        if missing.name != "torch":
            raise
        from dpcore.base.core_choice import NoCore, without_torch

        raise NoCore(without_torch()) from None
    value = module if name == "_C" else getattr(module, known_as)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def _called_late(home: str, name: str) -> Any:
    """A function that is imported when it is called, and returns None where its room is missing."""

    def call(*arguments: Any) -> Any:
        try:
            module = importlib.import_module(home)
        except ModuleNotFoundError as missing:
            if not home.startswith(missing.name or "?"):
                raise
            return None
        return getattr(module, name)(*arguments)

    return call


def _trace_the_run(*arguments: Any) -> None:
    if os.environ.get("DPCORE_TRACE"):
        _called_late("dpcore.recorder.automatic", "begin")(*arguments)


plugged_in.communicator_made = _trace_the_run
plugged_in.waits_for_long = _called_late("dpcore.tools.diagnose.long_wait", "warn")
plugged_in.page_of_trace = _called_late("dpcore.tools.show.page", "page_of_trace")
plugged_in.page_of_schedule = _called_late("dpcore.tools.show.page", "page_of_schedule")
