"""The backend "dpcore" of torch.distributed: what torch asks of it outside of collectives.

``create`` is called by torch once per process group. The group's own communicator meets through
the store that torch hands over; the compiled backend (``csrc/torch_backend``) works on it.
"""

from __future__ import annotations

import atexit
import os
import pickle
from typing import TYPE_CHECKING, Any

from dpcore._autoload import register
from dpcore.errors import Unsupported
from dpcore.group_meeting import meet

if TYPE_CHECKING:
    from dpcore.communicator import Communicator

__all__ = ["communicator_of", "create", "flight_record", "register", "write_flight_record"]

# By the name of the group. torch keeps the compiled backend alone, not these objects of Python;
# they go when another group is made, or asked for, after theirs was destroyed.
_groups: dict[str, tuple[Communicator, Any]] = {}


def create(options: Any, backend_options: Any) -> Any:
    """A ``torch.distributed.Backend`` for the group that ``options`` describes."""
    from dpcore import _C

    if backend_options is not None:
        raise Unsupported(
            f"the backend dpcore takes no pg_options, and got {type(backend_options).__name__}"
        )
    # torch's DDP asks a backend for the memory of its buckets only when this says "0".
    os.environ.setdefault("DDP_DISABLE_COMM_MEM", "0")
    timeout = options.timeout.total_seconds()
    communicator = meet(options.store, options.group_rank, options.group_size, timeout)
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    backend = _C.make_torch_backend(
        communicator._native, options.store, timeout, options.group_id, ranks
    )
    _forget_closed()
    _groups[options.group_id] = (communicator, backend)
    return backend


def _forget_closed() -> None:
    for name in [name for name, (communicator, _) in _groups.items() if communicator.closed]:
        del _groups[name]


def communicator_of(group: Any) -> Communicator | None:
    """The communicator behind a process group with the backend dpcore; None of others."""
    _forget_closed()
    communicator, _ = _groups.get(group.group_name, (None, None))
    return communicator


@atexit.register
def _shut_down() -> None:
    """Callbacks of futures need the interpreter: they end before it does."""
    for _, backend in list(_groups.values()):
        backend.shutdown()
    _groups.clear()


# ---- flight recorder -------------------------------------------------------------------------


def flight_record() -> dict[str, Any]:
    """The last operations of this process, in the form of torch's flight recorder."""
    from dpcore import _C

    entries = [_entry(row) for row in _C.flight_entries()]
    groups = {entry["process_group"] for entry in entries}
    return {
        "version": "2.10",
        "entries": entries,
        "pg_config": {name: _group(name, description) for name, description in sorted(groups)},
        "pg_status": {},
    }


def write_flight_record(prefix: str) -> str:
    """Writes ``<prefix><rank>``; ``torchfrtrace DIRECTORY -p PREFIX`` reads those of all ranks."""
    import torch.distributed as dist

    path = f"{prefix}{dist.get_rank()}"
    with open(path, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        pickle.dump(flight_record(), file)
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


def _group(name: str, description: str) -> dict[str, str]:
    communicator, _ = _groups.get(name, (None, None))
    ranks = list(range(communicator.world_size)) if communicator is not None else []
    return {"name": name, "desc": description, "ranks": str(ranks)}
