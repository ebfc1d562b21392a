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

from dpcore._version import __version__ as __version__
from dpcore.base import plugged_in

if TYPE_CHECKING:  # the same names for type checkers, in the form by which they are public
    from dpcore._C import Schedule as Schedule
    from dpcore._C import algorithms_of as algorithms_of
    from dpcore._C import check_schedule as check_schedule
    from dpcore._C import schedule as schedule
    from dpcore._C import schedule_cost as schedule_cost
    from dpcore.comm.communicators.mpi.communicator import MpiCommunicator as MpiCommunicator
    from dpcore.comm.communicators.native import Communicator as Communicator
    from dpcore.comm.communicators.nccl import nccl_library as nccl_library
    from dpcore.comm.communicators.torch_group import TorchCommunicator as TorchCommunicator
    from dpcore.comm.communicators.work import Work as Work
    from dpcore.comm.launch.session import current as current
    from dpcore.comm.launch.session import finalize as finalize
    from dpcore.comm.launch.session import init as init
    from dpcore.comm.launch.spawn import spawn as spawn
    from dpcore.comm.launch.torch_backend import BackendOptions as BackendOptions
    from dpcore.comm.launch.torch_backend import communicator_of as communicator_of
    from dpcore.comm.launch.torch_backend import flight_record as flight_record
    from dpcore.comm.launch.torch_backend import write_flight_record as write_flight_record
    from dpcore.ddp.across_steps.distributed import DistributedOptimizer as DistributedOptimizer
    from dpcore.ddp.check import CheckResult as CheckResult
    from dpcore.ddp.check import check as check
    from dpcore.ddp.data_parallel import DataParallel as DataParallel
    from dpcore.ddp.elastic.run import ElasticRun as ElasticRun
    from dpcore.ddp.elastic.run import elastic as elastic
    from dpcore.ddp.local_updates.diloco import DiLoCo as DiLoCo
    from dpcore.ddp.local_updates.local_sgd import LocalSGD as LocalSGD
    from dpcore.ddp.monitor import Monitor as Monitor
    from dpcore.ddp.monitor import monitor as monitor
    from dpcore.ddp.noise_scale import GradientNoiseScale as GradientNoiseScale
    from dpcore.ddp.noise_scale import gradient_noise_scale as gradient_noise_scale
    from dpcore.ddp.overlap import Overlap as Overlap
    from dpcore.ddp.overlap import measure_overlap as measure_overlap
    from dpcore.ddp.torch_face.comm_hooks import compose_comm_hooks as compose_comm_hooks
    from dpcore.ddp.warm_memory import warm_memory as warm_memory
    from dpcore.errors import Error as Error
    from dpcore.errors import Mismatch as Mismatch
    from dpcore.errors import MistakeWarning as MistakeWarning
    from dpcore.errors import PeerLost as PeerLost
    from dpcore.errors import RendezvousError as RendezvousError
    from dpcore.errors import Timeout as Timeout
    from dpcore.errors import Unsupported as Unsupported
    from dpcore.functions import all_gather as all_gather
    from dpcore.functions import all_reduce as all_reduce
    from dpcore.functions import all_to_all as all_to_all
    from dpcore.functions import barrier as barrier
    from dpcore.functions import broadcast as broadcast
    from dpcore.functions import gather as gather
    from dpcore.functions import recv as recv
    from dpcore.functions import reduce as reduce
    from dpcore.functions import reduce_scatter as reduce_scatter
    from dpcore.functions import scatter as scatter
    from dpcore.functions import send as send
    from dpcore.parallel.mesh import mesh as mesh
    from dpcore.parallel.pipeline_plans import pipeline_plan as pipeline_plan
    from dpcore.recorder.entry import trace as trace
    from dpcore.recorder.recording import Trace as Trace
    from dpcore.reference.launch_schedule import LaunchControl as LaunchControl
    from dpcore.reference.launch_schedule import LaunchSchedule as LaunchSchedule

    DistributedDataParallel = DataParallel

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
    "dpcore.ddp.overlap": "Overlap measure_overlap",
    "dpcore.ddp.warm_memory": "warm_memory",
    "dpcore.ddp.torch_face.comm_hooks": "compose_comm_hooks",
    "dpcore.errors": "Error Mismatch MistakeWarning PeerLost RendezvousError Timeout Unsupported",
    "dpcore.functions": "all_gather all_reduce all_to_all barrier broadcast gather recv reduce "
    "reduce_scatter scatter send",
    "dpcore.comm.launch.session": "current finalize init",
    "dpcore.comm.launch.spawn": "spawn",
    "dpcore.comm.launch.torch_backend": "BackendOptions communicator_of flight_record "
    "write_flight_record",
    "dpcore.ddp.local_updates.diloco": "DiLoCo",
    "dpcore.ddp.local_updates.local_sgd": "LocalSGD",
    "dpcore.ddp.noise_scale": "GradientNoiseScale gradient_noise_scale",
    "dpcore.ddp.across_steps.distributed": "DistributedOptimizer",
    "dpcore.parallel.mesh": "mesh",
    "dpcore.parallel.pipeline_plans": "pipeline_plan",
    "dpcore.recorder.entry": "trace",
    "dpcore.recorder.recording": "Trace",
    "dpcore.reference.launch_schedule": "LaunchControl LaunchSchedule",
    "dpcore.ddp.monitor": "Monitor monitor",
}
_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}

# Under torch's name as well, so that the import is all that a script for torch DDP changes.
_OTHER_NAMES = {"DistributedDataParallel": "DataParallel"}

_NAMES = sorted([*_HOME, *_OTHER_NAMES, "__version__"])
__all__ = list(_NAMES)

# What IPython calls.
_HOME["load_ipython_extension"] = "dpcore.school.notebook.extension"
_HOME["unload_ipython_extension"] = "dpcore.school.notebook.extension"


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
