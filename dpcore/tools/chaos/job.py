"""The ranks of a job under faults: started, heard, killed, stopped and started again.

A rank is a process that this starts with a command, or several below it (a launcher of one rank):
faults go to the process that tells of steps. They reach it by its pidfd, so never another process
that has got its number.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from dpcore.base.processes import end_with_parent, look_at
from dpcore.ddp.elastic.progress import VARIABLE
from dpcore.tools.hosts import Hosts, free_port

_MOST_BYTES = 1 << 16
_END_SECONDS = 10.0


@dataclass
class Started:
    """A rank that this has started."""

    place: int  # among the first ranks
    process: subprocess.Popen[bytes]
    joins: bool
    at: float
    pid: int = 0  # of the process that trains, once it has told of a step
    pidfd: int = -1
    number: int = -1  # in the job
    is_killed: bool = False
    is_stopped: bool = False
    has_stepped: bool = False  # in the job, where it joins
    is_told: bool = False  # that it has ended by itself

    @property
    def trains(self) -> bool:
        """Whether it has finished a step and nothing has ended it."""
        return self.pid > 0 and not self.is_killed and self.process.poll() is None


@dataclass
class Step:
    """As the last rank has told of it."""

    step: int
    at: float
    ranks: tuple[int, ...]
    digests: set[str] = field(default_factory=set)


class Job:
    """``command`` is what each rank runs, with the variables of a plain launch; on several hosts,
    ranks are dealt out to them in turn."""

    def __init__(
        self, command: Sequence[str], world: int, hosts: Hosts | None, output: int | None
    ) -> None:
        self._command, self.world, self._hosts = list(command), world, hosts
        self._output = output
        self._folder = tempfile.TemporaryDirectory(prefix="dpcore-chaos-")
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        address = str(Path(self._folder.name) / "told")
        self._line.bind(address)
        token = secrets.token_hex(8)
        door = f"file://{self._folder.name}/door" if hosts else f"chaos-{token}"
        self._environment: Mapping[str, str] = {
            **os.environ,
            VARIABLE: address,
            "DPCORE_DOOR": door,
            "DPCORE_SECRET": secrets.token_hex(16),
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": hosts.address(0) if hosts else "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        self.ranks: list[Started] = []
        self.steps: dict[int, Step] = {}
        self.repeated = 0
        for place in range(world):
            self.start(place, False)

    def start(self, place: int, joins: bool) -> Started:
        """A rank, also in place of one that has ended."""
        command, environment = self._command, {**self._environment, "RANK": str(place)}
        if joins:
            environment["DPCORE_JOIN"] = "1"
        if self._hosts is not None:
            command = self._hosts.inside(self.host_of(place), *command)
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=self._output,
            start_new_session=True, preexec_fn=partial(end_with_parent, os.getpid()),  # noqa: PLW1509
        )  # fmt: skip
        self.ranks.append(Started(place, process, joins, time.monotonic()))
        return self.ranks[-1]

    def host_of(self, place: int) -> int:
        """Of the hosts, if there are several."""
        return place % len(self._hosts.names) if self._hosts is not None else 0

    @property
    def living(self) -> list[Started]:
        """Those that nothing has ended, whether or not they train already."""
        return [one for one in self.ranks if not one.is_killed and one.process.poll() is None]

    @property
    def last(self) -> Step | None:
        """The last finished step."""
        return self.steps[max(self.steps)] if self.steps else None

    def listen(self, seconds: float) -> list[dict[str, Any]]:
        """What the ranks have told, as soon as one has."""
        heard = []
        wait = max(0.0, seconds)
        while select.select([self._line], [], [], wait)[0]:
            with contextlib.suppress(ValueError):
                heard.append(json.loads(self._line.recv(_MOST_BYTES)))
            wait = 0.0
        for said in heard:
            self._take(said)
        return heard

    def _take(self, said: dict[str, Any]) -> None:
        one = self._rank_of(int(said["process"]))
        if one is not None:
            one.number = int(said["number"])
        self.repeated += said["what"] == "again"
        number, ranks = int(said["step"]), tuple(said["ranks"])
        known = self.steps.get(number)
        if said["what"] == "digest" and known is not None and known.ranks == ranks:
            known.digests.add(str(said["digest"]))
        if said["what"] != "step":
            return
        if known is None or (known.ranks != ranks and said["at"] > known.at):
            known = self.steps[number] = Step(number, float(said["at"]), ranks)
        known.at = max(known.at, float(said["at"]))

    def _rank_of(self, pid: int) -> Started | None:
        for one in self.ranks:
            if one.pid == pid and not one.is_killed:
                return one
        if pid in self._gone:
            return None
        above = _ancestors(pid)
        for one in self.ranks:
            if one.pid == 0 and one.process.pid in above:
                one.pid = pid
                with contextlib.suppress(OSError):
                    one.pidfd = os.pidfd_open(pid)
                return one
        return None

    @property
    def _gone(self) -> set[int]:
        return {one.pid for one in self.ranks if one.is_killed}

    # ---- faults ------------------------------------------------------------------------------

    def kill(self, one: Started) -> None:
        """At once, and everything that its command has started."""
        one.is_killed = True
        if one.pidfd >= 0:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(one.pidfd, signal.SIGKILL)
        with contextlib.suppress(OSError):
            os.killpg(one.process.pid, signal.SIGKILL)

    def stop(self, one: Started) -> None:
        """Until ``go_on``."""
        one.is_stopped = True
        self._signal(one, signal.SIGSTOP)

    def go_on(self, one: Started) -> None:
        """Wakes it."""
        one.is_stopped = False
        self._signal(one, signal.SIGCONT)

    def _signal(self, one: Started, number: signal.Signals) -> None:
        with contextlib.suppress(OSError):
            if one.pidfd >= 0:
                signal.pidfd_send_signal(one.pidfd, number)
            else:
                one.process.send_signal(number)

    def cable(self, host: int, is_up: bool) -> None:
        """Of a host: pulled out, or back."""
        assert self._hosts is not None
        state = "up" if is_up else "down"
        words = ("link", "set", f"p{host}", state)
        subprocess.run(["ip", "-n", self._hosts.switch, *words], check=True, capture_output=True)

    def slow(self, host: int, is_slow: bool) -> None:
        """What leaves a host, to 20 Mbit/s."""
        assert self._hosts is not None
        words = ["tc", "qdisc", "add" if is_slow else "del", "dev", "eth0", "root"]
        words += ["tbf", "rate", "20mbit", "burst", "32kb", "latency", "50ms"] if is_slow else []
        subprocess.run(self._hosts.inside(host, *words), check=False, capture_output=True)

    # ---- the end -----------------------------------------------------------------------------

    def end(self) -> list[int]:
        """Kills what is left. Returns the processes of killed ranks that did not go."""
        for one in self.ranks:
            if one.process.poll() is None:
                self.kill(one)
        left = []
        for one in self.ranks:
            try:
                one.process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                left.append(one.process.pid)
            if one.pidfd >= 0:
                os.close(one.pidfd)
        self._line.close()
        self._folder.cleanup()
        return left


def _ancestors(pid: int) -> set[int]:
    found = {pid}
    while pid > 1:
        seen = look_at(pid)
        if seen is None:
            break
        pid = seen.parent
        found.add(pid)
    return found
