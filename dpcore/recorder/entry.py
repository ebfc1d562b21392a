"""``dpcore.trace``: chooses the kind of recording for a communicator."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpcore.comm.communicators.checks import check_integer, check_is
from dpcore.comm.communicators.protocol import capabilities_of
from dpcore.comm.launch import session
from dpcore.errors import Error, Unsupported
from dpcore.recorder import facts as trace_facts
from dpcore.recorder.recording import Trace

if TYPE_CHECKING:
    from dpcore.comm.communicators.native import Communicator


def trace(
    path: str | os.PathLike[str] | None = None,
    comm: Communicator | None = None,
    capacity: int = 65536,
) -> Trace:
    """Records the operations and waits of a ``with`` block on every rank.

    ``path``      rank 0 writes this file when the block ends, with the events of all ranks. All
                  ranks of ``comm`` must then enter and leave the block. After an error each rank
                  writes its own file instead (``run.rank1.json``). None: no file, and each rank
                  records by itself. A FIFO, a device or a link at ``path`` stays and is written to.
    ``comm``      the communicator to record, or a process group or DDP of torch. The default is
                  the communicator of ``dpcore.init()``, else that of the program's models, else
                  torch's default group, where torch's profiler records torch's own DDP.
                  Operations of groups split from the same ``init()`` are recorded as well.
    ``capacity``  how many events each rank keeps; older ones are dropped and counted.

    Operations that are still in flight at the end are not recorded: wait for them inside.

    >>> import numpy, dpcore
    >>> comm = dpcore.init(rank=0, world_size=1)
    >>> with dpcore.trace() as t:
    ...     comm.all_reduce(numpy.ones(100, numpy.float32))
    >>> t.by_operation()["all_reduce"]["bytes"]
    400
    >>> dpcore.finalize()
    """
    if comm is None:
        comm = _default_communicator()
    if not isinstance(path, os.PathLike):
        check_is("a string", or_none=True, path=path)
    capacity = check_integer(capacity, "trace: capacity")
    target = None if path is None else Path(path)
    if not capabilities_of(comm).traces:
        from dpcore.recorder import torch_trace

        group: Any = torch_trace.group_of(comm)
        if group is not None:
            return torch_trace.ProfilerTrace(target, group, capacity)
        raise Unsupported(
            f"trace: {getattr(comm, 'backend', type(comm).__name__)} does not record what it does; "
            "pass comm= a communicator of dpcore.init()"
        )
    return Trace(target, comm, capacity)


def _default_communicator() -> Any:
    """The communicator of ``dpcore.init()``, else that of models that were wrapped without it."""
    opened = session.opened()
    if opened is not None:
        return opened
    groups = trace_facts.groups_of_models()
    if len(groups) > 1:
        raise Error(
            f"trace: the models of this program have {len(groups)} communicators, and a trace "
            "shows the ranks of one: pass comm=model.group of the model that it is about"
        )
    if not groups:
        from dpcore.recorder import torch_trace

        if torch_trace.is_initialised():
            return torch_trace.TorchGroup()
    return groups[0] if groups else session.current()
