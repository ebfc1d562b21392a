"""Hosts for tests: those of `dpcore.tools.hosts`, with forked ranks and cables that fail."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator

from dpcore.tools import hosts as namespaces
from dpcore.tools.hosts import ip, why_not
from tests.ranks import python

__all__ = ["Hosts", "hosts", "ip", "why_not"]


class Hosts(namespaces.Hosts):
    def fork(self, host: int, script: str, environment: dict[str, str]) -> subprocess.Popen[str]:
        """As `start`, of a Python that has imported torch already."""
        return python.start(
            "-c", script, network=self.names[host], env={**os.environ, **environment},
            text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def cable(self, host: int, state: str) -> None:
        """Pulls the plug of a host ("down") or puts it back ("up")."""
        ip("-n", self.switch, "link", "set", f"p{host}", state)

    def deafen(self, host: int) -> None:
        """What others send to a host gets lost; what it sends arrives."""
        command = ["tc", "-n", self.switch, "qdisc", "add", "dev", f"p{host}", "root", "tbf"]
        subprocess.run(
            [*command, "rate", "8bit", "burst", "10", "limit", "10"],
            check=True,
            capture_output=True,
        )

    def busiest_port(self, host: int) -> str:
        """Of the host's connections, the local port of the one with the most waiting to leave: more
        than the few bytes of a control message. At a moment there may be none: it looks again."""
        until = time.monotonic() + 10
        while True:
            listed = subprocess.run(
                self.inside(host, "ss", "-Htn", "state", "established"),
                check=True, capture_output=True, text=True,
            )  # fmt: skip
            rows = [line.split() for line in listed.stdout.splitlines()]
            most = max(rows, key=lambda row: int(row[1]))  # receive queue, send queue, here, there
            if int(most[1]) > 4096:
                return most[2].rpartition(":")[2]
            assert time.monotonic() < until, listed.stdout

    def forget_ipv4(self) -> None:
        for host in range(len(self.names)):
            ip("-n", self.names[host], "addr", "flush", "dev", "eth0", "scope", "global")
            address = f"{self.address(host, 6)}/64"
            ip("-n", self.names[host], "addr", "add", address, "dev", "eth0", "nodad")


@contextlib.contextmanager
def hosts(count: int) -> Iterator[Hosts]:
    with namespaces.hosts(count) as made:
        yield Hosts(made.names, made.switch)
