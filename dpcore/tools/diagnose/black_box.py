"""The black boxes of ranks, read from outside while they run or hang.

Every rank keeps its last operations in its arena, which is a ``memfd``: a file without a name that
``/proc/PID/fd`` still leads to. Beside it lie the mirrors, where the process keeps what ranks of
other hosts have told of themselves. Both are read, never written, and the process is not stopped.
What is read may be one operation old by the time it is printed, or torn when the rank is busy.

The places of all fields are in ``control_layout.json``, which the build has from the compiler
(tools/control_layout.cpp): importing the compiled core, and torch with it, would take longer than
the reading.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from dpcore.errors import Error

_ARENA, _MIRRORS = "/memfd:dpcore-arena", "/memfd:dpcore-mirrors"
_PAGE = 4096  # control blocks begin on a page
_SEARCHED_BYTES = 4 << 30
_REDUCING = ("all_reduce", "reduce_scatter", "reduce")
_ROOTED = ("broadcast", "reduce", "gather", "scatter")


@cache
def layout() -> dict[str, Any]:
    """Where the fields of the black boxes lie, and the names behind their numbers."""
    file = Path(__file__).parent / "control_layout.json"
    try:
        loaded: dict[str, Any] = json.loads(file.read_text())
    except FileNotFoundError:
        raise Error(
            f"{file} is missing: this dpcore was installed where there was no C++ compiler. "
            "Inspect the process with the dpcore that it runs"
        ) from None
    return loaded


def read(pid: int) -> list[dict[str, Any]]:
    """The black box of every communicator that is open in a process of this host.

    Several where ranks are threads, or groups were split; the one of ``init()`` comes first.
    """
    boxes = []
    for descriptor in _files(pid, _ARENA):
        try:
            boxes += list(_Arena(pid, descriptor).boxes())
        finally:
            os.close(descriptor)
    if not boxes:
        raise Error(
            f"process {pid} has no dpcore communicator: it is not a rank, has not finished init(), "
            "or is a forked child of a rank"
        )
    return boxes


def read_mirrors(pid: int) -> list[dict[str, Any]]:
    """What the process was told by ranks of other hosts: a black box for each of their groups."""
    boxes = []
    for descriptor in _files(pid, _MIRRORS):
        try:
            boxes += list(_Mirrors(pid, descriptor).boxes())
        finally:
            os.close(descriptor)
    return boxes


def ranks_of_this_host() -> list[int]:
    """The processes that have arenas, of those that this user may look into."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, Error):
                if any(_owns(int(name), link) for link in os.listdir(f"/proc/{name}/fd")):
                    found.append(int(name))
    return sorted(found)


def _owns(pid: int, name: str) -> bool:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/fd/{name}").startswith(_ARENA)
    return False


def _files(pid: int, name: str) -> Iterator[int]:
    """Descriptors of the files of this kind that a process has open. The caller closes them."""
    directory = f"/proc/{pid}/fd"
    try:
        for number in sorted(os.listdir(directory), key=int):
            path = f"{directory}/{number}"
            try:
                if os.readlink(path).startswith(name):
                    yield os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue  # closed in the meantime
    except (FileNotFoundError, ProcessLookupError):
        raise Error(f"there is no process {pid} on this host") from None
    except PermissionError:
        why = (
            "belongs to another user; try sudo"
            if os.geteuid()
            else "can't be looked into, even by root: the system forbids it, as containers do "
            "without CAP_SYS_PTRACE"
        )
        raise Error(f"process {pid} {why}") from None


class _Reader:
    """An open file and the layout of what is in it."""

    def __init__(self, pid: int, descriptor: int) -> None:
        self._pid = pid
        self._descriptor = descriptor
        self._layout = layout()
        self._bytes = os.fstat(descriptor).st_size
        self._now_ns = time.monotonic_ns()

    def _is_plausible(self, control: Mapping[str, int]) -> bool:
        return (
            control["magic"] == self._layout["magic"]
            and control["version"] == self._layout["version"]
            and 0 <= control["rank"] < control["world"]
        )

    def _box(self, offset: int, control: Mapping[str, int], origin: str) -> dict[str, Any]:
        operations = list(self._operations(offset))
        return {
            "pid": self._pid,
            "job": f"{control['job']:016x}",
            "group": control["group"],
            "member": control["member"],
            "rank": control["rank"],
            "world_size": control["world"],
            "communicator": origin,
            "operations_entered": control["operations_seen"],
            "finalized": bool(control["left"]),
            "in_flight": [entry for entry in operations if "took_ms" not in entry],
            "finished": [entry for entry in operations if "took_ms" in entry],
            "abort": self._abort(offset),
            "message": self._message(offset),
            "where": self._where(offset),
            "alive_seconds_ago": self._seconds_since(control["alive_ns"] or None),
            "arena_bytes": self._bytes,
        }

    def _operations(self, control_at: int) -> Iterator[dict[str, Any]]:
        size = self._layout["sizes"]["history_entry"]
        first = control_at + self._layout["control"]["history"][0]
        entries = (
            self._struct("history_entry", first + index * size)
            for index in range(self._layout["history"])
        )
        known = [entry for entry in entries if entry is not None and entry["number"] > 0]
        for entry in sorted(known, key=lambda entry: entry["number"]):
            yield self._operation(entry)

    def _operation(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        what = entry["fingerprint"]
        kind = self._name("collectives", what["collective"])
        result = {"number": entry["number"] - 1, "collective": kind}
        if kind != "barrier":
            result |= {"dtype": self._name("dtypes", what["dtype"]), "count": what["count"]}
            result["bytes"] = entry["bytes"]
        if kind in _REDUCING:
            result["op"] = self._name("ops", what["op"])
        if kind in _ROOTED:
            result["root"] = what["root"]
        if entry["end_ns"]:
            result["took_ms"] = round((entry["end_ns"] - entry["begin_ns"]) * 1e-6, 3)
            result["seconds_ago"] = self._seconds_since(entry["end_ns"])
        else:
            result["since_seconds"] = self._seconds_since(entry["begin_ns"])
        return result

    def _abort(self, control_at: int) -> dict[str, Any] | None:
        at = control_at + self._layout["control"]["abort"][0]
        record = self._struct("abort", at)
        why = self._struct("failure", at + self._layout["abort"]["failure"][0])
        if record is None or record["state"] != 2 or why is None:
            return None
        return {
            "error": self._name("errors", why["kind"]),
            "culprit": why["culprit"],
            "reason": why["reason"],
            "seconds_ago": self._seconds_since(why["when_ns"]),
        }

    def _message(self, control_at: int) -> dict[str, Any] | None:
        """The send or recv that the rank was last seen waiting in."""
        wait = self._struct("message", control_at + self._layout["control"]["message"][0])
        if wait is None or wait["seen_ns"] == 0:
            return None
        return {
            "direction": "send" if wait["sends"] else "recv",
            "peer": wait["peer"],
            "tag": wait["tag"],
            "bytes": wait["bytes"],
            "since_seconds": self._seconds_since(wait["since_ns"]),
            "seen_seconds_ago": self._seconds_since(wait["seen_ns"]),
        }

    def _where(self, control_at: int) -> dict[str, Any] | None:
        """The line that the program was last seen in."""
        at = control_at + self._layout["control"]["placement"][0]
        where, again = self._struct("placement", at), self._struct("placement", at)
        for _ in range(10):  # it may be replaced just now
            if where is None or again is None or (again == where and where["changes"] % 2 == 0):
                break
            where, again = again, self._struct("placement", at)
        if where is None or where["seen_ns"] == 0:
            return None
        return {
            "line": where["text"],
            "since_seconds": self._seconds_since(where["since_ns"]),
            "seen_seconds_ago": self._seconds_since(where["seen_ns"]),
            "operations_entered": where["operations"],
        }

    def _struct(self, name: str, offset: int) -> dict[str, Any] | None:
        """The fields of a struct, or None where the file ends before it does."""
        data = os.pread(self._descriptor, self._layout["sizes"][name], offset)
        if len(data) < self._layout["sizes"][name]:
            return None
        return self._fields(name, data)

    def _fields(self, name: str, data: bytes) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for field, (at, size, signed) in self._layout[name].items():
            piece = data[at : at + size]
            if field == "fingerprint":
                fields[field] = self._fields(field, piece)
            elif field in ("reason", "text"):
                fields[field] = piece.split(b"\0")[0].decode(errors="replace")
            elif size <= 8:
                fields[field] = int.from_bytes(piece, sys.byteorder, signed=signed)
        return fields

    def _name(self, table: str, number: int) -> str:
        names: list[str] = self._layout[table]
        return names[number] if number < len(names) else str(number)

    def _seconds_since(self, when_ns: int | None) -> float | None:
        return None if when_ns is None else round((self._now_ns - when_ns) * 1e-9, 3)


class _Arena(_Reader):
    """The boxes of a rank of this host, in its own memory."""

    def boxes(self) -> Iterator[dict[str, Any]]:
        header = self._struct("header", 0)
        if header is None or header["magic"] != self._layout["magic"]:
            return  # between creation and init()
        if header["version"] != self._layout["version"]:
            raise Error(
                f"process {self._pid} runs another version of dpcore (layout {header['version']}, "
                f"here {self._layout['version']}): inspect it with that version"
            )
        root = header["root_control_offset"]
        offsets = [root, *(at for at in self._marked_pages() if at != root)]
        for offset in offsets:
            control = self._struct("control", offset)
            if control is None or not self._is_plausible(control):
                continue
            if offset == root or not control["left"]:
                yield self._box(offset, control, "init" if offset == root else "split")

    def _marked_pages(self) -> Iterator[int]:
        """Where control blocks of split groups may lie. Pages are read, not mapped: touching a
        hole of a mapped memfd would give it memory."""
        magic = self._layout["magic"].to_bytes(8, sys.byteorder)
        for offset in range(_PAGE, min(self._bytes, _SEARCHED_BYTES), _PAGE):
            if os.pread(self._descriptor, 8, offset) == magic:
                yield offset


class _Mirrors(_Reader):
    """What a rank of this host knows of a group's members on other hosts."""

    def boxes(self) -> Iterator[dict[str, Any]]:
        header = self._struct("mirrors", 0)
        if header is None or header["magic"] != self._layout["magic"]:
            return
        if header["version"] != self._layout["version"]:
            return  # its arena has said so
        for offset in range(header["first"], self._bytes, header["stride"]):
            control = self._struct("control", offset)
            if control is not None and self._is_plausible(control):
                yield self._box(offset, control, "init" if control["group"] == 0 else "split")


# ---- in words, as the core's own messages write them ------------------------------------------


def describe(entry: Mapping[str, Any]) -> str:
    """
    >>> describe({"number": 7, "collective": "all_reduce", "count": 3, "dtype": "f32", "op": "max"})
    'operation 7 (all_reduce of 3 x f32, max)'
    """
    text = f"operation {entry['number']} ({entry['collective']}"
    if "count" in entry:
        text += f" of {entry['count']} x {entry['dtype']}"
    if "op" in entry:
        text += f", {entry['op']}"
    if "root" in entry:
        text += f", root {entry['root']}"
    return text + ")"


def describe_message(message: Mapping[str, Any], members: Mapping[int, int]) -> str:
    """``members``: by rank in the group, the rank that is to be named.

    >>> wait = {"direction": "recv", "peer": 1, "tag": 5, "bytes": 12}
    >>> describe_message(wait, {0: 4, 1: 6})
    'recv of 12 bytes from rank 6 (tag 5)'
    """
    peer = message["peer"]
    other = "any rank" if peer < 0 else f"rank {members.get(peer, peer)}"
    way = "to" if message["direction"] == "send" else "from"
    return (
        f"{message['direction']} of {message['bytes']} bytes {way} {other} (tag {message['tag']})"
    )
