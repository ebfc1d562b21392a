"""One contender's ranks: started, commanded with a deadline on every wait, and always ended.

Ranks lead sessions of their own, so Ctrl-C reaches the orchestrator alone, which ends them. Should
the orchestrator die without a chance to, each rank sees its socket close and kills itself.

They are programs and not ``RankProcesses`` (comm/launch): mpiexec starts some of them, in a Python
that may lack torch, and a contender is measured without memory inherited from a fork server.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import time
from pathlib import Path
from typing import Any

from dpcore.base.processes import look_at
from dpcore.tools.compare.collectives import contenders
from dpcore.tools.compare.collectives.wires import LOOPBACK, Wire

START_SECONDS = 90.0
QUIT_SECONDS = 10.0


class GroupError(Exception):
    """A rank died, answered with an error, or let a deadline pass. The group is ended by then."""


class RankGroup:
    def __init__(
        self,
        name: str,
        world: int,
        folder: Path,
        huge_pages: bool = False,
        wire: Wire = LOOPBACK,
    ) -> None:
        self.name, self.world = name, world
        self.versions: dict[str, str] = {}
        self._job = folder / f"{name}-{time.monotonic_ns():x}"
        self._log = Path(f"{self._job}.log")
        self._channels: list[_Channel] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        commands = contenders.commands(name, world, str(self._job), wire)
        environment = contenders.environment(world, str(folder), huge_pages, wire.interface)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(f"{self._job}.sock")
            self._listener.listen(world)
            with self._log.open("wb") as log:
                for command in commands:
                    self._processes.append(
                        subprocess.Popen(
                            command,
                            stdin=subprocess.DEVNULL,
                            stdout=log,
                            stderr=log,
                            env=environment,
                            start_new_session=True,
                        )
                    )
        except BaseException:
            self.kill()
            raise

    def wait_ready(self) -> None:
        """Until every rank has loaded its library and met the others."""
        deadline = time.monotonic() + START_SECONDS
        try:
            self._accept_all(deadline)
            replies = self._collect(deadline)
        except OSError as error:
            self.kill()
            raise GroupError(f"{self.name}: lost at start ({error}){self._last_words()}") from None
        except BaseException:
            self.kill()
            raise
        for channel, reply in zip(self._channels, replies, strict=True):
            channel.rank = reply["rank"]
        self._channels.sort(key=lambda channel: channel.rank)
        self.versions = replies[0]["versions"]

    def ask(self, command: dict[str, Any], seconds: float) -> list[dict[str, Any]]:
        """Sends a command to all ranks and returns their answers in rank order."""
        line = json.dumps(command).encode() + b"\n"
        try:
            for channel in self._channels:
                channel.socket.sendall(line)
            return self._collect(time.monotonic() + seconds)
        except OSError as error:
            self.kill()
            raise GroupError(f"{self.name}: a rank is gone ({error}){self._last_words()}") from None
        except BaseException:
            self.kill()  # ranks may now be anywhere in a collective: nothing to go on with
            raise

    @property
    def alive(self) -> bool:
        return bool(self._channels)

    def cpu_seconds(self) -> float:
        """Processor time of all ranks so far: shows whether idle ranks really sleep."""
        seen = (look_at(channel.pid) for channel in self._channels)
        return sum(one.processor_seconds for one in seen if one is not None)

    def stop(self) -> None:
        """Lets the ranks leave in order; those that have not after a while are killed."""
        try:
            if self._channels:
                with contextlib.suppress(GroupError):
                    self.ask({"do": "quit"}, QUIT_SECONDS)
                for process in self._processes:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(QUIT_SECONDS)
        finally:
            self.kill()

    def kill(self) -> None:
        for channel in self._channels:
            channel.kill()
        self._channels = []
        self._listener.close()
        for process in self._processes:
            # mpiexec gets a moment to remove what it made; ranks need none.
            for number, patience in ((signal.SIGTERM, 2.0), (signal.SIGKILL, QUIT_SECONDS)):
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, number)
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(patience)

    def _accept_all(self, deadline: float) -> None:
        self._listener.settimeout(0.1)
        while len(self._channels) < self.world:
            try:
                connection, _ = self._listener.accept()
                self._channels.append(_Channel(connection))
                continue
            except TimeoutError:
                pass
            ended = [p for p in self._processes if p.poll() is not None]
            if ended:
                status = ended[0].returncode
                raise GroupError(f"{self.name}: start ended with {status}{self._last_words()}")
            if time.monotonic() > deadline:
                raise GroupError(f"{self.name}: not started in {START_SECONDS:g} s")

    def _collect(self, deadline: float) -> list[dict[str, Any]]:
        """One answer of every rank. The orchestrator sleeps meanwhile."""
        missing = set(self._channels)
        with selectors.DefaultSelector() as selector:
            for channel in missing:
                selector.register(channel.socket, selectors.EVENT_READ, channel)
            while missing:
                left = deadline - time.monotonic()
                ready = selector.select(max(0.0, left))
                if not ready:
                    late = sorted(channel.rank for channel in missing)
                    raise GroupError(f"{self.name}: no answer of ranks {late} in time")
                for key, _ in ready:
                    channel = key.data
                    reply = channel.read()
                    if reply is None:
                        continue
                    if "error" in reply:
                        raise GroupError(f"{self.name}: {reply['error']}{self._last_words()}")
                    selector.unregister(channel.socket)
                    missing.discard(channel)
        return [channel.reply for channel in self._channels]

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            lines = self._log.read_text(errors="replace").strip().splitlines()
            if lines:
                return "; its last words: " + "; ".join(line.strip() for line in lines[-4:])
        return ""


class _Channel:
    """The socket of one rank, and a handle on its process that no other can inherit."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.rank = -1
        self.reply: dict[str, Any] = {}
        size = struct.calcsize("3i")
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        self.pid: int = struct.unpack("3i", credentials)[0]
        self._handle: int | None = None
        with contextlib.suppress(OSError):
            self._handle = os.pidfd_open(self.pid)
        self._partial = b""

    def read(self) -> dict[str, Any] | None:
        """The answer once its line is complete."""
        data = self.socket.recv(1 << 16)
        if not data:
            raise ConnectionError(f"rank {self.rank}, process {self.pid}, closed its connection")
        self._partial += data
        if not self._partial.endswith(b"\n"):
            return None
        self.reply = json.loads(self._partial)
        self._partial = b""
        return self.reply

    def kill(self) -> None:
        self.socket.close()
        if self._handle is not None:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            os.close(self._handle)
            self._handle = None
