"""The ranks of a group of torch meet for a communicator of dpcore, through the group's store."""

from __future__ import annotations

import contextlib
import os
import uuid
from typing import Any

from dpcore.communicators.native import Communicator
from dpcore.launch import session
from dpcore.launch.identity import Identity
from dpcore.launch.rendezvous import tcp_options
from dpcore.launch.stores import TorchStore


def job_and_hosts(store: Any, rank: int, world_size: int) -> tuple[str, list[str]]:
    """The name of this rendezvous, which no other has, and the host of every rank.

    All ranks of the group call it, and none leaves before all have come.
    """
    # Asked by every rank once per communicator: equal numbers are the same attempt.
    attempt = store.add(f"dpcore/attempts/{rank}", 1)
    store.set(f"dpcore/{attempt}/{rank}", f"{_host()}|{uuid.uuid4().hex}")
    said = [store.get(f"dpcore/{attempt}/{peer}").decode() for peer in range(world_size)]
    job = f"dpcore/{os.geteuid()}/group-{said[0].partition('|')[2]}"
    return job, [text.partition("|")[0] for text in said]


def meet(store: Any, rank: int, world_size: int, timeout: float) -> Communicator:
    """Over mapped memory within a host, over TCP between hosts."""
    job, hosts = job_and_hosts(store, rank, world_size)
    identity = Identity(rank, world_size, job)
    with contextlib.ExitStack() as stack:
        transport, tcp = "shm", None
        if len(set(hosts)) > 1:
            transport = "shm+tcp"
            at = TorchStore(store, "the process group's store")
            tcp = stack.enter_context(
                tcp_options(identity, job, None, timeout, at=at, shares_memory=True)
            )
        return session.connect(job, rank, world_size, timeout=timeout, transport=transport, tcp=tcp)


def _host() -> str:
    """Equal for two processes exactly when abstract Unix sockets lead from one to the other: the
    same running kernel and the same network namespace."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        kernel = file.read().strip()
    return f"{kernel}/{os.stat('/proc/self/ns/net').st_ino}"
