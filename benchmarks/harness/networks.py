"""A question that is asked of two kinds of network: emulated NICs and shaped ones.

emulated  ranks of this process behind link="1gbit,50us" (csrc/comm/transport/link.h): NICs
          that send and receive one message after the other
shaped    hosts of their own (network namespaces), real TCP, NICs that the kernel shapes both
          ways; the rate is the goodput of raw TCP streams in the same run. Needs root.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import dpcore as dp
from benchmarks.harness.shaped import on_hosts
from dpcore.base.link import parse_speed
from dpcore.tools import hosts as namespaces
from dpcore.tools.records import program

_TIMEOUT = 600.0


@dataclass(frozen=True)
class Network:
    """``kind``: "emulated" or "shaped". ``link``: what ``dpcore.init`` or tc calls its speed."""

    kind: str
    link: str
    world: int

    def run(self, body: Callable[..., Any], **arguments: Any) -> tuple[list[Any], float]:
        """What ``body(comm, **arguments)`` returned on each rank, and bytes per second."""
        rate = parse_speed(self.link).bytes_per_second
        if self.kind == "shaped":
            return on_hosts(body, self.world, self.link, rate, **arguments)

        def emulated(comm: Any) -> Any:
            return body(comm, **arguments)

        return dp.spawn(
            emulated, self.world, mode="threads", link=self.link, timeout=_TIMEOUT
        ), rate


def add_kinds(made: argparse.ArgumentParser) -> None:
    made.add_argument("--questions", default="emulated,shaped", help="default: %(default)s")


def networks_of(
    kinds: str, emulated: Sequence[tuple[str, int]], shaped: Sequence[tuple[str, int]]
) -> list[Network]:
    """Those of the kinds that are asked for, from links and numbers of ranks. Where this machine
    has no namespaces, shaped ones are left out, and it says why."""
    found = []
    if "emulated" in kinds:
        found += [Network("emulated", link, world) for link, world in emulated]
    if "shaped" in kinds:
        if reason := namespaces.why_not():
            print(f"{program()}: shaped hosts: {reason}", file=sys.stderr)
        else:
            found += [Network("shaped", rate, world) for rate, world in shaped]
    return found
