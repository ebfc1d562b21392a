"""``init_process_group("dpcore", init_method="dpcore://")``: ranks meet where ``dp.init()`` does.

torch's own ``env://`` wants RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which mpirun and srun do
not set. Here a rank finds out who it is as in ``dpcore.init()``. Rank 0 serves a TCPStore, at the
address it is told (MASTER_ADDR, the nodes of a Slurm step), or at a port of its own choice that the
others learn from the launcher or, on one host, from a socket without a file.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlparse

from dpcore.comm.launch.identity import Identity, InstanceCounter, find_identity, may_span_hosts
from dpcore.comm.launch.rendezvous import (
    for_ranks_of,
    from_rank_0,
    known_address,
    own_address,
    rendezvous_store,
)
from dpcore.comm.launch.stores import HostStore, Store

_instances = InstanceCounter()
# Of rank 0, by address: its server at a port that all ranks were told stays until the process ends.
# A rank that begins the next group while rank 0 still ends the last one connects to it; a server
# that went with its group would take that connection along, and both would wait for each other.
_served: dict[str, Any] = {}


def identity_of(url: str) -> Identity:
    """Rank and world of ``init_process_group(rank=, world_size=)``, which torch writes into the
    URL, or else what the launcher says."""
    given = {name: int(values[0]) for name, values in parse_qs(urlparse(url).query).items()}
    return find_identity(given.get("rank"), given.get("world_size"))


def rendezvous(url: str, timeout: timedelta | None) -> Iterator[tuple[Any, int, int]]:
    """A handler for ``torch.distributed.register_rendezvous_handler``."""
    dist: Any = importlib.import_module("torch.distributed")

    patience = timeout or dist.constants.default_pg_timeout
    identity = identity_of(url)
    store = dist.HashStore() if identity.world_size == 1 else _serve(identity, patience)
    yield store, identity.rank, identity.world_size
    raise RuntimeError("a dpcore:// rendezvous works once; call init_process_group() again")


def _serve(identity: Identity, timeout: timedelta) -> Any:
    seconds = timeout.total_seconds()
    deadline = time.monotonic() + seconds
    spans = may_span_hosts(identity.world_size)
    address = known_address(os.environ, None, identity) if spans else ""
    board: Store | None = None
    if not spans:
        board = HostStore()
    elif not address:
        board = rendezvous_store(os.environ, identity, None, seconds)
    with contextlib.ExitStack() as published:
        name = published.enter_context(_instances.next(identity))
        key = f"{name}/store"
        listener = None
        if board is not None and identity.rank == 0:
            host = own_address(identity, os.environ) if spans else "127.0.0.1"
            listener = socket.create_server(
                (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET
            )
            address = f"{host}:{listener.getsockname()[1]}"
            published.enter_context(board.publish(key, for_ranks_of(board, address)))
        elif board is not None:
            address = from_rank_0(board.read(key, deadline))
        store = _store_at(address, identity, timeout, listener)
        # At a port that all ranks were told, that of an earlier group may go on as this one's.
        return store if board is not None else _prefixed(name, store)


def _prefixed(name: str, store: Any) -> Any:
    dist: Any = importlib.import_module("torch.distributed")
    return dist.PrefixStore(name, store)


def _store_at(
    address: str, identity: Identity, timeout: timedelta, listener: socket.socket | None
) -> Any:
    """Returns when all ranks are there. The store takes the listener over."""
    dist: Any = importlib.import_module("torch.distributed")

    host, _, port = address.rpartition(":")
    store = dist.TCPStore(
        host.strip("[]"),
        int(port),
        identity.world_size,
        identity.rank == 0,
        timeout,
        wait_for_workers=True,
        master_listen_fd=None if listener is None else listener.detach(),
        multi_tenant=listener is None,
    )
    if listener is None and identity.rank == 0:
        _served.setdefault(address, store)
    return store
