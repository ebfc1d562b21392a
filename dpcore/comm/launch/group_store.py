"""The ranks of a group of torch meet for a communicator of dpcore, through the group's store."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import Any

from dpcore.comm.communicators.native import Communicator
from dpcore.comm.launch import session
from dpcore.comm.launch.fresh_names import agree
from dpcore.comm.launch.identity import Identity
from dpcore.comm.launch.rendezvous import pretended_host, tcp_options, this_host
from dpcore.comm.launch.stores import TorchStore


def job_and_hosts(store: Any, rank: int, world_size: int, timeout: float) -> tuple[str, list[str]]:
    """The name of this rendezvous, which no other has, and the host of every rank.

    All ranks of the group call it, and none leaves before all have come.
    """
    host = f"{this_host()} {pretended_host(rank, os.environ)}"
    name, hosts = agree(store, rank, world_size, timeout, host)
    return f"dpcore/group-{name}", hosts


def meet(store: Any, rank: int, world_size: int, timeout: float) -> Communicator:
    """Over mapped memory within a host, over TCP between hosts."""
    job, hosts = job_and_hosts(store, rank, world_size, timeout)
    return between(hosts, job, store, rank, world_size, timeout)


def between(
    hosts: list[str],
    job: str,
    store: Any,
    rank: int,
    world_size: int,
    timeout: float,
    *,
    meets_within: float = 0.0,
    environment: Mapping[str, str] | None = None,
) -> Communicator:
    """The same for ranks that know each other's hosts. They have to meet in ``meets_within``
    seconds, or else in ``timeout``, which is that of operations."""
    identity = Identity(rank, world_size, job)
    with contextlib.ExitStack() as stack:
        transport, tcp = "shm", None
        if len(set(hosts)) > 1:
            transport = "shm+tcp"
            at = TorchStore(store, "the process group's store")
            options = tcp_options(
                identity, job, None, meets_within or timeout, environment, at=at, shares_memory=True
            )
            tcp = stack.enter_context(options)
        algorithm = session.algorithm_or_variable("auto", world_size)
        return session.connect(
            job,
            rank,
            world_size,
            timeout=timeout,
            meets_within=meets_within,
            transport=transport,
            tcp=tcp,
            algorithm=algorithm,
        )
