"""The ranks of a group of torch meet for a communicator of dpcore, through the group's store."""

from __future__ import annotations

import contextlib
import os
import uuid
from typing import Any

from dpcore.communicators.native import Communicator
from dpcore.launch import session
from dpcore.launch.identity import Place
from dpcore.launch.rendezvous import tcp_place
from dpcore.launch.stores import TorchStore


def places_of(store: Any, rank: int, world_size: int) -> tuple[str, list[str]]:
    """The name of this meeting, which no other has, and the host of every rank.

    All ranks of the group call it, and none leaves before all have come.
    """
    # Asked by every rank once per communicator: equal numbers are the same attempt.
    attempt = store.add(f"dpcore/attempts/{rank}", 1)
    store.set(f"dpcore/{attempt}/{rank}", f"{_host()}|{uuid.uuid4().hex}")
    places = [store.get(f"dpcore/{attempt}/{peer}").decode() for peer in range(world_size)]
    job = f"dpcore/{os.geteuid()}/group-{places[0].partition('|')[2]}"
    return job, [place.partition("|")[0] for place in places]


def meet(store: Any, rank: int, world_size: int, timeout: float) -> Communicator:
    """Over mapped memory within a host, over TCP between hosts."""
    job, hosts = places_of(store, rank, world_size)
    place = Place(rank, world_size, job)
    with contextlib.ExitStack() as meeting:
        transport, tcp = "shm", None
        if len(set(hosts)) > 1:
            transport = "shm+tcp"
            at = TorchStore(store, "the process group's store")
            tcp = meeting.enter_context(
                tcp_place(place, job, None, timeout, at=at, shares_memory=True)
            )
        return session.connect(job, rank, world_size, timeout=timeout, transport=transport, tcp=tcp)


def _host() -> str:
    """Equal for two processes exactly when abstract Unix sockets lead from one to the other: the
    same running kernel and the same network namespace."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        kernel = file.read().strip()
    return f"{kernel}/{os.stat('/proc/self/ns/net').st_ino}"
