"""How ranks that share no memory find each other: an address of rank 0, and a secret.

The connections themselves, and who is let in, are the compiled core's: see
``csrc/comm/rendezvous/meet_tcp.h``.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import stat
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from dpcore.comm.communicators.work import LONGEST_SECONDS
from dpcore.comm.launch import mpi_rendezvous, pmi, pmix
from dpcore.comm.launch.fresh_names import agree
from dpcore.comm.launch.identity import Identity, slurm_address, spans_hosts
from dpcore.comm.launch.stores import FileStore, HostStore, Store, TorchStore
from dpcore.errors import RendezvousError

if TYPE_CHECKING:
    from dpcore import _C

# One stream fills a link, or the processors that serve it; docs/decisions/0020.
_SOCKETS = 1
_OTHER_ADDRESS = (
    "set DPCORE_SOCKET_IFNAME to its network card (ip address lists them), or MASTER_ADDR to an "
    "address of its host"
)


@contextlib.contextmanager
def tcp_options(
    identity: Identity,
    job: str,
    init_method: str | None,
    timeout: float,
    environment: Mapping[str, str] | None = None,
    at: Store | None = None,
    *,
    shares_memory: bool = False,
) -> Iterator[_C.TcpOptions | None]:
    """What ``_C.start`` needs to meet over TCP. Rank 0 can be found while the context lasts.

    ``at``: where rank 0 leaves its address for ranks of other hosts, whatever the launcher says.
    ``shares_memory``: ranks that find out that they share a host use its memory.
    """
    from dpcore import _C

    env = os.environ if environment is None else environment
    if identity.world_size == 1:
        yield None
        return
    timeout = min(timeout, LONGEST_SECONDS)
    interface = env.get("DPCORE_SOCKET_IFNAME", "")
    address = "" if at else known_address(env, init_method, identity)
    store = at or (None if address else rendezvous_store(env, identity, init_method, timeout))
    deadline = time.monotonic() + timeout
    with contextlib.ExitStack() as published:
        listener = None
        if identity.rank == 0 and store is None:
            listener = _C.TcpListener.at(address, interface)
        elif identity.rank == 0:
            assert store is not None
            spans = at is not None or bool(spans_hosts(identity.world_size, env))
            listener = _reachable_listener(env, spans)
            address = listener.address
            published.enter_context(store.publish(job, for_ranks_of(store, address)))
        elif store is not None:
            address = from_rank_0(store.read(job, deadline))
        if at and _C.is_loopback(address) and not env.get("DPCORE_PRETEND_HOSTS"):
            raise RendezvousError(
                "the ranks are on several hosts, and rank 0 found only the address "
                f"{address.rpartition(':')[0]} of its own: {_OTHER_ADDRESS}"
            )
        secret = read_secret(env)
        if not secret and not _C.is_loopback(address):
            _warn_once(address, "on that network")
        elif not secret and not _C.knows_users_at(address):
            _warn_once(address, "on this host")
        sockets = _number(env, "DPCORE_TCP_SOCKETS", _SOCKETS)
        host = pretended_host(identity.rank, env)
        yield _C.TcpOptions(address, listener, interface, secret, sockets, shares_memory, host)


@contextlib.contextmanager
def advised(transport: str, init_method: str | None) -> Iterator[None]:
    """Ranks that meet at a file are taken for ranks of one host: an error says what else they need
    where they are not."""
    try:
        yield
    except RendezvousError as problem:
        wanted = [] if transport != "shm" else ["pass transport='shm+tcp'"]
        if not os.environ.get("DPCORE_SOCKET_IFNAME"):
            wanted.append("set DPCORE_SOCKET_IFNAME to the network card of rank 0's host")
        if not (init_method or "").startswith("file://") or not wanted:
            raise
        advice = f"; if they are on several hosts, {' and '.join(wanted)}"
        raise RendezvousError(f"{problem}{advice}") from problem


def pretended_host(rank: int, env: Mapping[str, str]) -> str:
    """DPCORE_PRETEND_HOSTS: a list by rank, which begins again when it is too short.

    >>> [pretended_host(rank, {"DPCORE_PRETEND_HOSTS": "a,a,b"}) for rank in range(4)]
    ['a', 'a', 'b', 'a']
    """
    names = env.get("DPCORE_PRETEND_HOSTS", "").split(",")
    return names[rank % len(names)].strip()


def own_address(identity: Identity, env: Mapping[str, str]) -> str:
    """The address of this host at which the other ranks can reach it."""
    listener = _reachable_listener(env, bool(spans_hosts(identity.world_size, env)))
    return listener.address.rpartition(":")[0].strip("[]")


def for_ranks_of(store: Store, address: str) -> str:
    """What rank 0 publishes: an address that is its host's alone says whose it is."""
    from dpcore import _C

    finds_out_by_itself = isinstance(store, (FileStore, HostStore))
    if finds_out_by_itself or not _C.is_loopback(address):
        return address
    return f"{address}|{this_host()}"


def from_rank_0(published: str) -> str:
    """The address, unless it leads elsewhere from this host."""
    address, _, host = published.partition("|")
    if host and host != this_host():
        raise RendezvousError(
            "this rank is on another host than rank 0, and rank 0 found only the address "
            f"{address.rpartition(':')[0]} of its own: {_OTHER_ADDRESS}"
        )
    return address


def this_host() -> str:
    """Equal for two processes exactly when abstract Unix sockets lead from one to the other: the
    same running kernel and the same network namespace."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        kernel = file.read().strip()
    return f"{kernel}/{os.stat('/proc/self/ns/net').st_ino}"


def _reachable_listener(env: Mapping[str, str], spans: bool) -> _C.TcpListener:
    """At any port of the address by which the other ranks can reach this host. ``spans``: not all
    of them are on it."""
    from dpcore import _C

    master = env.get("MASTER_ADDR") or (socket.gethostname() if spans else "127.0.0.1")
    return _C.TcpListener.towards(_joined(master, "1"), env.get("DPCORE_SOCKET_IFNAME", ""))


def known_address(env: Mapping[str, str], init_method: str | None, identity: Identity) -> str:
    """Where rank 0 is told to listen, or nothing when it may choose."""
    if init_method is not None and init_method.startswith("tcp://"):
        return init_method.removeprefix("tcp://").rstrip("/")
    if init_method not in (None, "env://") or _torch_group() or _agent_has_store(env):
        return ""
    if "MASTER_ADDR" in env and "MASTER_PORT" in env:
        return _joined(env["MASTER_ADDR"], env["MASTER_PORT"])
    if _launcher_store(env, identity):
        return ""
    if address := slurm_address(env):
        return address
    raise RendezvousError(
        "ranks that are to meet over TCP need the address of rank 0: set MASTER_ADDR and "
        "MASTER_PORT, or pass init_method='tcp://host:port' or 'file:///path'"
    )


def rendezvous_store(
    env: Mapping[str, str], identity: Identity, init_method: str | None, timeout: float
) -> Store:
    """Where rank 0 leaves the address that it has chosen."""
    if init_method is not None and init_method.startswith("file://"):
        return FileStore(init_method.removeprefix("file://"))
    if init_method not in (None, "env://"):
        return HostStore()
    if group := _torch_group():
        if group.get_world_size() != identity.world_size:
            raise RendezvousError(
                f"torch.distributed has {group.get_world_size()} ranks, init() was told of "
                f"{identity.world_size}; pass init_method= for a communicator of other ranks"
            )
        store = group.distributed_c10d._get_default_store()
        return _fresh(store, "torch.distributed's store", identity, timeout)
    if not _agent_has_store(env) and (line := _launcher_store(env, identity, timeout)):
        return line
    # The agent has the port and serves the store there: every rank is a client of it.
    dist: Any = importlib.import_module("torch.distributed")
    host, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    try:
        store = dist.TCPStore(
            host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout)
        )
    except Exception as error:
        raise RendezvousError(f"no answer from the launcher's store at {host}:{port}") from error
    return _fresh(store, f"the launcher's store at {host}:{port}", identity, timeout)


def _fresh(store: Any, name: str, identity: Identity, timeout: float) -> TorchStore:
    """Without what ranks before a restart have left there."""
    dist: Any = importlib.import_module("torch.distributed")
    prefix, _ = agree(store, identity.rank, identity.world_size, timeout)
    return TorchStore(dist.PrefixStore(f"dpcore/{prefix}", store), name)


def _launcher_store(
    env: Mapping[str, str], identity: Identity, timeout: float = LONGEST_SECONDS
) -> Store | None:
    """Ranks of one host need nothing else. Otherwise that of MPI, where it runs: it has the
    launcher's line. Otherwise the line."""
    one_host = spans_hosts(identity.world_size, env) is False
    if one_host and not env.get("DPCORE_PRETEND_HOSTS"):
        return HostStore()
    running = mpi_rendezvous.connect(identity.rank, identity.world_size, timeout)
    return running or pmi.connect(env, timeout) or pmix.connect(env)


def _torch_group() -> Any:
    """torch.distributed, when it is initialised."""
    dist = sys.modules.get("torch.distributed")
    return dist if dist is not None and dist.is_available() and dist.is_initialized() else None


def _agent_has_store(env: Mapping[str, str]) -> bool:
    return env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def read_secret(env: Mapping[str, str]) -> str:
    """What every rank of the job must know: DPCORE_SECRET, or the file DPCORE_SECRET_FILE."""
    if secret := env.get("DPCORE_SECRET"):
        return secret
    path = env.get("DPCORE_SECRET_FILE")
    if not path:
        return ""
    try:
        with open(path) as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
                raise RendezvousError(
                    f"DPCORE_SECRET_FILE {path} can be read by others; type: chmod 600 {path}"
                )
            secret = file.read().strip()
    except OSError as error:
        raise RendezvousError(f"DPCORE_SECRET_FILE: {error}") from error
    if not secret:
        raise RendezvousError(f"DPCORE_SECRET_FILE {path} is empty")
    return secret


_warned = False


def _warn_once(address: str, where: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"dpcore meets at {address} without a secret: everybody {where} is trusted. "
            "Set DPCORE_SECRET to the same random text on all ranks, or DPCORE_SECRET_FILE to a "
            "file of mode 0600 that holds it",
            RuntimeWarning,
            stacklevel=4,
        )


def _joined(host: str, port: str) -> str:
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise RendezvousError(f"{name}={text!r} is not a whole number") from None
