"""Where rank 0 leaves the address that it listens at, and the others find it.

A store is needed when the address is not known beforehand: rank 0 takes any free port and
publishes it under a key that belongs to one communicator of one job (and one restart of it).
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from dpcore.base.files import write_whole
from dpcore.errors import RendezvousError

_LOOK_SECONDS = 0.02


class Store(Protocol):
    def publish(self, key: str, value: str) -> contextlib.AbstractContextManager[None]:
        """Shows the value to all other ranks while the context lasts."""

    def read(self, key: str, deadline: float) -> str:
        """The value, as soon as it is there; ``RendezvousError`` at the deadline (monotonic)."""


class TorchStore:
    """A store of torch.distributed: that of the launcher's agent, or of an initialised group."""

    def __init__(self, store: Any, name: str) -> None:
        self._store = store
        self._name = name

    @contextlib.contextmanager
    def publish(self, key: str, value: str) -> Iterator[None]:
        self._store.set(key, value)
        yield

    def read(self, key: str, deadline: float) -> str:
        patience = timedelta(seconds=max(0.001, deadline - time.monotonic()))
        try:
            self._store.wait([key], patience)
        except Exception as error:  # torch raises RuntimeErrors of several kinds
            raise RendezvousError(
                f"rank 0 did not publish its address in {self._name} before the deadline: {error}"
            ) from error
        return bytes(self._store.get(key)).decode()


class FileStore:
    """A file that all hosts see. Rank 0 writes it, and takes it away when the ranks have met."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    @contextlib.contextmanager
    def publish(self, key: str, value: str) -> Iterator[None]:
        if os.path.lexists(self._path) and (self._path.is_symlink() or not self._path.is_file()):
            raise RendezvousError(
                f"rank 0: {self._path} is not a regular file, and the rendezvous file is removed "
                "when the ranks have met; give file:// a path of its own"
            )
        try:
            write_whole(self._path, f"{key} {value}\n")
        except OSError as error:
            raise RendezvousError(f"rank 0: can't write the rendezvous file: {error}") from error
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                self._path.unlink()

    def read(self, key: str, deadline: float) -> str:
        silent = ""
        while True:
            with contextlib.suppress(OSError, ValueError):
                if not self._path.is_file():
                    raise FileNotFoundError(self._path)
                found, address = self._path.read_text().split()
                # A file that an earlier job left behind names an address where nothing listens.
                if found == key and _somebody_listens(address):
                    return address
                silent = address if found == key else silent
            if time.monotonic() > deadline and silent:
                raise RendezvousError(
                    f"nothing listens at {silent}, the address in {self._path}; if rank 0 is on "
                    "another host, set DPCORE_SOCKET_IFNAME to its network card there"
                )
            if time.monotonic() > deadline:
                raise RendezvousError(
                    f"rank 0 did not write its address to {self._path} before the deadline; is "
                    "it running, and does it see the same file system?"
                )
            time.sleep(_LOOK_SECONDS)


class HostStore:
    """For ranks of one host that want TCP all the same: an abstract Unix socket, no file."""

    @contextlib.contextmanager
    def publish(self, key: str, value: str) -> Iterator[None]:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(_abstract(key))
        except OSError as error:
            listener.close()
            raise RendezvousError(
                f"rank 0: another process is already rank 0 of '{key}'; choose another init_method"
            ) from error
        listener.listen(128)
        answering = threading.Thread(target=_answer_all, args=(listener, value), daemon=True)
        answering.start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            answering.join()
            listener.close()

    def read(self, key: str, deadline: float) -> str:
        while True:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as line:
                line.settimeout(max(0.001, deadline - time.monotonic()))
                line.connect(_abstract(key))
                if not is_same_user(line):
                    raise RendezvousError("another user's process listens as rank 0")
                address = line.recv(256).decode()
                if address:
                    return address
            if time.monotonic() > deadline:
                raise RendezvousError(
                    f"rank 0 did not arrive at '{key}' before the deadline; is it running on this "
                    "host? Ranks on several hosts need MASTER_ADDR and MASTER_PORT, or "
                    "init_method='tcp://host:port'"
                )
            time.sleep(_LOOK_SECONDS)


def _abstract(key: str) -> str:
    return f"\0{key}/address"


def _answer_all(listener: socket.socket, value: str) -> None:
    while True:
        try:
            line, _ = listener.accept()
        except OSError:  # shut down
            return
        with line, contextlib.suppress(OSError):
            if is_same_user(line):
                line.sendall(value.encode())


def is_same_user(line: socket.socket) -> bool:
    credentials = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", credentials)[1] == os.geteuid())


def _somebody_listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=1.0).close()
    except OSError:
        return False
    return True
