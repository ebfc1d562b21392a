"""Hosts for tests: those of `dpcore.compare.hosts`, whose ranks may be forked."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator

from dpcore.compare import hosts as namespaces
from dpcore.compare.hosts import ip, why_not
from tests.ranks import python

__all__ = ["Hosts", "hosts", "ip", "why_not"]


class Hosts(namespaces.Hosts):
    def fork(self, host: int, script: str, environment: dict[str, str]) -> subprocess.Popen[str]:
        """As `start`, of a Python that has imported torch already."""
        return python.start(
            "-c", script, network=self.names[host], env={**os.environ, **environment},
            text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip


@contextlib.contextmanager
def hosts(count: int) -> Iterator[Hosts]:
    with namespaces.hosts(count) as made:
        yield Hosts(made.names, made.switch)
