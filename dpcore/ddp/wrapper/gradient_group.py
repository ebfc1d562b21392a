"""With whom gradients are averaged: finds the group for a model.

What ``DataParallel`` needs of a group is small (``GradientGroup``). dpcore's communicator has it;
process groups of torch and communicators of mpi4py get it from adapters.
"""

from __future__ import annotations

import os
import warnings
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dpcore.base.link import check_no_link
from dpcore.comm.communicators.mpi.communicator import MpiCommunicator
from dpcore.comm.communicators.native import Communicator
from dpcore.comm.communicators.protocol import GradientGroup
from dpcore.comm.communicators.torch_group import TorchCommunicator as TorchGroup
from dpcore.comm.launch import session
from dpcore.comm.launch.group_store import between, job_and_hosts
from dpcore.comm.launch.threads import choose_kernels
from dpcore.comm.launch.torch_backend import communicator_of, device_communicator_over
from dpcore.errors import Error, Unsupported

_MEETING_SECONDS = 30.0  # between hosts, of ranks that have all come
_DEFAULT_TIMEOUT = timedelta(minutes=30)  # of torch's groups that do not tell theirs


def choose_group(comm: Any, process_group: Any, device: torch.device) -> GradientGroup:
    """``comm``, else ``process_group``, else that of ``dpcore.init()``, else torch's default."""
    if comm is not None and process_group is not None:
        raise Unsupported("give comm= or process_group=, not both")
    if hasattr(process_group, "all_reduce"):
        raise TypeError("process_group is a group of torch.distributed; write comm= for this one")
    if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
        raise TypeError(
            f"process_group: expected a group of torch.distributed, not {process_group!r}"
        )
    choose_kernels()  # the group may be torch's alone
    if comm is not None:
        return _adapted(comm)
    if process_group is not None:
        return of_process_group(process_group, device)
    opened = session.opened()
    if opened is not None:
        return opened
    if dist.is_available() and dist.is_initialized():
        return of_process_group(dist.group.WORLD, device)
    raise Error(
        "there are no ranks to average over yet: call dpcore.init() or "
        "torch.distributed.init_process_group() first, or pass comm="
    )


def torch_group_of(comm: Any, process_group: Any) -> Any:
    """The process group of torch behind what ``choose_group`` chooses, or None."""
    if comm is not None:
        return comm if isinstance(comm, dist.ProcessGroup) else None
    if process_group is not None:
        return process_group
    if not dist.is_available() or not dist.is_initialized():
        return None
    opened = session.opened()
    same = opened is None or opened.world_size == dist.get_world_size()
    return dist.distributed_c10d._get_default_group() if same else None


def is_default(process_group: Any) -> bool:
    """Whether ``choose_group`` would choose it unasked."""
    if process_group is None:
        return True
    return session.opened() is None and process_group is dist.group.WORLD


def _adapted(comm: Any) -> GradientGroup:
    if isinstance(comm, dist.ProcessGroup):
        return TorchGroup(comm)
    if hasattr(comm, "Iallreduce"):
        return _over_mpi(comm)
    if isinstance(comm, GradientGroup):
        return comm
    raise Unsupported(
        f"comm: {type(comm).__name__} lacks what averaging needs: rank, world_size, "
        "all_reduce, broadcast and all_gather. Pass a dpcore.Communicator, a process group of "
        "torch, an mpi4py communicator, or an object with these"
    )


def _over_mpi(comm: Any) -> MpiCommunicator:
    """One for all models over the same communicator of mpi4py."""
    known = [own for given, own in _of_mpi if given == comm and not own.closed and not own.failed]
    if not known:
        known = [MpiCommunicator(comm)]
        _of_mpi.append((comm, known[0]))
    return known[0]


_of_mpi: list[tuple[Any, MpiCommunicator]] = []


# ---- torch -----------------------------------------------------------------------------------

# By group and device.
_own: weakref.WeakKeyDictionary[Any, dict[torch.device, Communicator]] = weakref.WeakKeyDictionary()


def of_process_group(group: Any, device: torch.device) -> GradientGroup:
    """The ranks of a process group of torch. Where gradients are on the CPU, Gloo and MPI are slow:
    dpcore's own communicator takes their place. Of a group of the backend dpcore it is a part, on
    GPUs one of the same kind: a model that fails ends that, and not what the program uses."""
    own = _own.setdefault(group, {})
    communicator = own.get(device)
    if communicator is None or communicator.closed or communicator._native.failed:
        communicator = _make_own(group, device)
        if communicator is None:
            _say_what_has_no_effect(backend_of(group, device))
            return TorchGroup(group)
        own[device] = communicator
    return communicator


def backend_of(group: Any, device: torch.device) -> str:
    """What the group uses for tensors on this device: it may have been made without a name, or
    with one per device."""
    try:
        return str(group._get_backend(device).name())
    except RuntimeError:  # nothing for this device
        return str(dist.get_backend(group))


def _say_what_has_no_effect(backend: str) -> None:
    check_no_link(f"the process group {backend}")
    if os.environ.get("DPCORE_TRACE"):
        warnings.warn(
            f"DPCORE_TRACE: the gradients of this model travel over the process group {backend}, "
            "which it does not record",
            stacklevel=4,
        )


def _make_own(group: Any, device: torch.device) -> Communicator | None:
    """None: the group itself has to do it."""
    on_device = device_communicator_over(group, device)
    if on_device is not None or device.type != "cpu":
        return on_device
    of_group = communicator_of(group)
    if of_group is not None:
        return of_group.split(0)
    return _native_over(group) if backend_of(group, device) in ("gloo", "mpi") else None


def _native_over(group: Any) -> Communicator | None:
    """None when hosts can't reach each other. All ranks of the group call it and get the same."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    store, timeout = dist.distributed_c10d._world.pg_map[group][1], _timeout_of(group)
    seconds = timeout.total_seconds()
    job, hosts = job_and_hosts(store, rank, world_size, seconds)
    if len(set(hosts)) == 1:
        return between(hosts, job, store, rank, world_size, seconds)
    made, problem = None, "another rank could not"
    try:
        made = between(
            hosts, job, store, rank, world_size, seconds,
            meets_within=min(seconds, _MEETING_SECONDS), environment=_with_card_of_gloo(),
        )  # fmt: skip
    except Error as error:
        problem = str(error)
    have_met = torch.tensor(int(made is not None))
    dist.all_reduce(have_met, dist.ReduceOp.MIN, group=group)
    if have_met:
        return made
    if made is not None:
        made.close()
    warnings.warn(
        "dpcore could not connect the hosts of this process group, so gradients travel over "
        f"{dist.get_backend(group)}, which is slower: {problem}. With comm= and the group they do "
        "so without this attempt",
        RuntimeWarning,
        stacklevel=7,
    )
    return None


def _with_card_of_gloo() -> dict[str, str]:
    """A job that has told Gloo which network card to use need not tell us."""
    env = dict(os.environ)
    if card := env.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]:
        env.setdefault("DPCORE_SOCKET_IFNAME", card)
    return env


def _timeout_of(group: Any) -> timedelta:
    try:
        timeout = group._get_backend(torch.device("cpu")).options._timeout
    except (AttributeError, RuntimeError):
        return _DEFAULT_TIMEOUT
    return timeout if isinstance(timeout, timedelta) else _DEFAULT_TIMEOUT
