"""What this machine and its network cost: the constants behind the choice of algorithms.

``dpcore calibrate`` measures them once, with what else ``dpcore simulate`` needs, and leaves them
in a file of the user's cache, which ``init`` reads. Without the file, or with one of another
machine, there are defaults. Rank 0's constants count for all ranks, which therefore choose alike.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpcore.base.files import write_whole
from dpcore.base.link import Speed
from dpcore.base.machine import machine
from dpcore.errors import Unsupported

_FORMAT = 1
_WAYS = ("memory", "loopback", "network")
_OF_PROCESSORS = (
    "operation", "memory_operation", "message", "tcp_message", "wake", "busy_wake", "woken",
    "copied_byte", "reduced_byte", "fused_byte", "tcp_byte", "update_call",
)  # fmt: skip
_KEPT = (*_WAYS, "added_byte", *_OF_PROCESSORS, "after_pause")
_LONGEST_FILE = 100_000


@dataclass(frozen=True)
class Way:
    """In seconds: from a send to its arrival; for each message of a rank; for each byte."""

    step: float
    message: float
    byte: float


@dataclass(frozen=True)
class Costs:
    """``memory``: within a host. ``network``: between hosts. ``added_byte``: seconds to add one."""

    memory: Way
    network: Way
    added_byte: float
    source: str  # where the figures come from

    def as_list(self) -> list[float]:
        """In the order of ``_C.start``."""
        ways = (self.memory, self.network)
        return [x for way in ways for x in (way.step, way.message, way.byte)] + [self.added_byte]

    @classmethod
    def of_list(cls, values: list[float], source: str) -> Costs:
        """The other way round."""
        return cls(Way(*values[:3]), Way(*values[3:6]), values[6], source)


def cache_file(environment: Mapping[str, str] | None = None) -> Path:
    """Where the constants of this machine lie.

    >>> str(cache_file({"XDG_CACHE_HOME": "/var/cache/me"}))
    '/var/cache/me/dpcore/costs.json'
    """
    env = os.environ if environment is None else environment
    cache = env.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "dpcore" / "costs.json"


def fingerprint() -> dict[str, Any]:
    """Identifies the machine: constants that were measured on another one mean nothing here."""
    facts = machine()
    return {"processor": facts["processor"], "processors": os.cpu_count()}


def load(network: str = "network", path: Path | None = None) -> Costs:
    """The constants of this machine: the file's, or defaults and why they are used.

    ``network``: the link between hosts, "network" or "loopback".
    """
    from dpcore import _C

    where = cache_file() if path is None else path
    default = Costs.of_list(_C.default_costs(), "")
    try:
        found = _read(where)
        ways = {name: Way(*_seconds(found, name, 3)) for name in ("memory", network)}
        added = _seconds(found, "added_byte", 1)[0]
        return Costs(ways["memory"], ways[network], added, f"measured, {where}")
    except FileNotFoundError:
        reason = "this machine is not calibrated; type: dpcore calibrate"
    except _Unusable as problem:
        reason = f"{where} is not used: {problem}"
    except OSError as problem:
        reason = f"{where} is not used: {problem.strerror}"
    return replace(default, source=f"defaults ({reason})")


def over_link(costs: Costs, speed: Speed) -> Costs:
    """The same machine with an emulated network."""
    byte = 1.0 / speed.bytes_per_second if speed.bytes_per_second else costs.memory.byte
    way = Way(speed.latency + costs.memory.step, costs.memory.message, byte)
    return replace(costs, network=way, source=f"{costs.source}; the network is the emulated link")


def save(measured: Mapping[str, Any], path: Path | None = None) -> Path:
    """Writes what was measured, beside what the file has of this machine; read-only afterwards."""
    where = cache_file() if path is None else path
    try:
        before = {name: value for name, value in _read(where).items() if name in _KEPT}
    except (OSError, _Unusable):
        before = {}
    where.parent.mkdir(parents=True, exist_ok=True)
    content = {"format": _FORMAT, "machine": fingerprint(), **before, **measured}
    write_whole(where, json.dumps(content, indent=1) + "\n", mode=0o444)
    return where


def measured(path: Path | None = None) -> tuple[dict[str, list[float]], int]:
    """All that a file of ``dpcore calibrate`` holds, of whatever machine, and how many processors
    that one has. Raises an Error that says why the file is none."""
    where = cache_file() if path is None else path
    try:
        found = _read(where, of_any_machine=True)
        counts = {name: 3 if name in _WAYS else 1 for name in _KEPT if name in found}
        processors = found["machine"]["processors"]
        return {name: _seconds(found, name, n) for name, n in counts.items()}, int(processors)
    except FileNotFoundError:
        raise Unsupported(f"{where} does not exist; type: dpcore calibrate") from None
    except (_Unusable, KeyError, TypeError, ValueError) as problem:
        raise Unsupported(f"{where} is no file of dpcore calibrate: {problem}") from None


class _Unusable(Exception):
    """Why a file's constants don't count."""


def _read(path: Path, of_any_machine: bool = False) -> dict[str, Any]:
    # Of a FIFO, open would wait for a writer.
    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_NONBLOCK)

    with open(path, errors="replace", opener=opener) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise _Unusable("it is not a file of this user")
        text = file.read(_LONGEST_FILE)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _Unusable(f"it is damaged ({error})") from error
    if not isinstance(found, dict) or found.get("format") != _FORMAT:
        raise _Unusable("it has another format; type: dpcore calibrate")
    here, there = fingerprint(), found.get("machine")
    if there != here and not of_any_machine:
        raise _Unusable(f"it was measured on another machine: {there}, this is {here}")
    return found


def _seconds(found: Mapping[str, Any], name: str, count: int) -> list[float]:
    if name not in found:
        raise _Unusable(f"it has no {name!r}; type: dpcore calibrate")
    values = found[name] if isinstance(found[name], list) else [found[name]]
    usable = all(isinstance(x, float) and math.isfinite(x) and 0 <= x < 1 for x in values)
    if len(values) != count or not usable:
        raise _Unusable(f"it is damaged ({name!r} is {found[name]!r})")
    return values
