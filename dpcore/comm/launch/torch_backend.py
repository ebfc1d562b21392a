"""The backend "dpcore" of torch.distributed: what torch asks of it outside of collectives.

``create`` is called by torch once per process group. The group's own communicator meets through
the store that torch hands over; the compiled backend (``csrc/torch_backend``) works on it, and
makes others beside it when the first tensors on a GPU come. ``BackendOptions`` says over what.
"""

from __future__ import annotations

import atexit
import os
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from dpcore.base.files import write_whole
from dpcore.base.link import check_no_link, refusal_of_link
from dpcore.base.user_code import is_own
from dpcore.comm.communicators.nccl import wheel_libraries
from dpcore.comm.launch.group_store import meet
from dpcore.errors import Unsupported

if TYPE_CHECKING:
    from dpcore.comm.communicators.native import Communicator

_CUDA = ("auto", "nccl", "cuda")
_ON_GPUS = "the backend dpcore of torch.distributed for tensors on GPUs"


@dataclass(frozen=True)
class BackendOptions:
    """How a group treats tensors on GPUs; the same on all ranks.

        dist.init_process_group("dpcore", pg_options=BackendOptions(cuda="cuda"))

    ``cuda``   "nccl", "cuda" (dpcore's own over mapped memory: one host, ranks may share a GPU), or
               "auto": NCCL where every rank has a GPU of its own. Empty is what
               DPCORE_CUDA_BACKEND says, or else "auto".
    ``algorithm``, ``deterministic``   as those of ``dpcore.init(backend=...)``.
    """

    cuda: str = ""
    algorithm: str = "auto"
    deterministic: bool = False
    # Tests: tensors of the CPU count as those of a device of the host, which has this uuid.
    _host_uuid: str | None = None

    def wanted(self) -> str:
        """What carries operations on GPUs, by name."""
        choice = self.cuda or os.environ.get("DPCORE_CUDA_BACKEND", "") or "auto"
        if choice not in _CUDA:
            raise Unsupported(
                f"{choice!r} does not exist for GPUs; BackendOptions(cuda=...) and "
                f"DPCORE_CUDA_BACKEND take one of {_CUDA}"
            )
        return choice


class _Group(NamedTuple):
    communicator: Communicator
    options: BackendOptions
    timeout: float


# By the name of the group. These go when another group is made, or asked for, after theirs was
# destroyed. The compiled backend, and the store that it holds, are torch's alone and go with it.
_groups: dict[str, _Group] = {}


def create(options: Any, backend_options: Any) -> Any:
    """A ``torch.distributed.Backend`` for the group that ``options`` describes."""
    from dpcore import _C

    chosen = backend_options
    if chosen is None or isinstance(chosen, _options_of_torch()):
        # As in "cuda:nccl,cpu:dpcore": torch hands NCCL's options to all backends of a group.
        chosen = BackendOptions()
    if not isinstance(chosen, BackendOptions):
        raise Unsupported(
            f"the backend dpcore takes dpcore.BackendOptions as pg_options, not "
            f"{type(chosen).__name__}"
        )
    if is_own(chosen.algorithm):
        raise Unsupported(
            f"BackendOptions(algorithm={chosen.algorithm!r}): tensors on GPUs take dpcore's "
            "algorithms by name; for tensors on the CPU set DPCORE_ALGORITHM=FILE:NAME"
        )
    wanted = chosen.wanted()
    # torch's DDP asks a backend for the memory of its buckets only when this says "0".
    os.environ.setdefault("DDP_DISABLE_COMM_MEM", "0")
    timeout = options.timeout.total_seconds()
    communicator = meet(options.store, options.group_rank, options.group_size, timeout)
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    backend = _C.make_torch_backend(
        communicator._native,
        options.store,
        timeout,
        options.group_id,
        ranks,
        wanted,
        chosen.algorithm,
        chosen.deterministic,
        wheel_libraries(),
        chosen._host_uuid,
        refusal_of_link(_ON_GPUS),
    )
    _forget_closed()
    _groups[options.group_id] = _Group(communicator, chosen, timeout)
    return backend


def _forget_closed() -> None:
    if not _groups:
        return
    names = set(_groups_of_torch().values())
    for name, group in list(_groups.items()):
        if group.communicator.closed or name not in names:
            del _groups[name]


def _groups_of_torch() -> dict[Any, str]:
    """All that this process is in, and their names."""
    import torch.distributed as dist

    inner: Any = dist.distributed_c10d
    names: dict[Any, str] = inner._world.pg_names
    return names


def _options_of_torch() -> type:
    """What the options of its own backends have in common."""
    import torch

    common: type = torch._C._distributed_c10d.Backend.Options
    return common


def _known(group: Any) -> _Group | None:
    _forget_closed()
    known = _groups.get(group.group_name)
    if known is None:
        return None
    # A group of another backend may have the name of one of ours that was aborted.
    names = [group._get_backend(device).name() for device in group._device_types]
    return known if "dpcore" in names else None


def communicator_of(group: Any) -> Communicator | None:
    """The communicator on the host behind a process group with the backend dpcore; None of
    others."""
    known = _known(group)
    return None if known is None else known.communicator


def device_communicator_over(group: Any, device: Any) -> Communicator | None:
    """A new communicator for ``device`` over the ranks of a process group whose backend for it is
    dpcore, of the kind that the group itself takes; None of other groups. All ranks call it."""
    from dpcore.comm.communicators.device import on_device

    known = _known(group)
    if known is None:
        return None
    options = known.options
    if device.type != ("cuda" if options._host_uuid is None else "cpu"):
        return None
    if group._get_backend(device).name() != "dpcore":
        return None  # as in "cpu:dpcore,cuda:nccl"
    check_no_link(_ON_GPUS)
    control = known.communicator.split(0)
    assert control is not None  # every rank is in it
    made: Communicator = on_device(
        control,
        options.wanted(),
        device,
        timeout=known.timeout,
        algorithm=options.algorithm,
        deterministic=options.deterministic,
        host_uuid=options._host_uuid,
    )
    return made


@atexit.register
def _shut_down() -> None:
    """Callbacks of futures need the interpreter: they end before it does."""
    for group in _groups_of_torch() if _groups else ():
        for device in group._device_types:
            backend = group._get_backend(device)
            if backend.name() == "dpcore":
                getattr(backend, "wrapped_pg", backend).shutdown()  # torch may have wrapped it
    _groups.clear()


# ---- flight recorder -------------------------------------------------------------------------


def flight_record(messages: bool = True) -> dict[str, Any]:
    """The last operations of this process, in the form of torch's flight recorder; without
    ``messages`` only its collectives."""
    from dpcore import _C

    rows = [row for row in _C.flight_entries() if messages or not row["is_message"]]
    entries = [_entry(row) for row in rows]
    if not messages:  # torchfrtrace lines ranks up by these numbers, when the oldest are gone
        for entry, row in zip(entries, rows, strict=True):
            entry["record_id"] = row["collective_id"]
    groups = {row["group"]: (row["description"], row["ranks"]) for row in rows}
    return {
        "version": "2.10",
        "entries": entries,
        "pg_config": {
            name: {"name": name, "desc": description, "ranks": str(ranks)}
            for name, (description, ranks) in sorted(groups.items())
        },
        "pg_status": {},
    }


def write_flight_record(prefix: str) -> str:
    """Writes ``<prefix><rank>``; ``torchfrtrace DIRECTORY -p PREFIX`` reads those of all ranks.

    Collectives only: torchfrtrace expects every rank of a group in what it reads, and would miss
    those that have no part in a message.
    """
    import torch.distributed as dist

    path = f"{prefix}{dist.get_rank()}"
    write_whole(path, pickle.dumps(flight_record(messages=False)), mode=0o600)
    return path


def _entry(row: dict[str, Any]) -> dict[str, Any]:
    done = row["completed_ns"]
    return {
        "record_id": row["id"],
        "pg_id": int(row["group"]) if row["group"].isdecimal() else 0,
        "process_group": (row["group"], row["description"]),
        "collective_seq_id": row["collective"],
        "p2p_seq_id": row["message"],
        "op_id": row["operation"],
        "profiling_name": row["name"],
        "time_created_ns": row["created_ns"],
        "time_discovered_started_ns": row["created_ns"],
        "time_discovered_completed_ns": done or None,
        "duration_ms": (done - row["created_ns"]) / 1e6 if done else None,
        "input_sizes": [list(sizes) for sizes, _ in row["inputs"]],
        "input_dtypes": [dtype for _, dtype in row["inputs"]],
        "output_sizes": [list(sizes) for sizes, _ in row["outputs"]],
        "output_dtypes": [dtype for _, dtype in row["outputs"]],
        "state": "completed" if done and not row["failed"] else "scheduled",
        "retired": bool(done),
        "timeout_ms": row["timeout_ms"],
        "is_p2p": row["is_message"],
        "frames": [],
    }
