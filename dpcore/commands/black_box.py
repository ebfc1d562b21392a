"""``dpcore inspect``: what a rank does, read from outside while it runs or hangs.

Every rank keeps its last operations in its arena, which is a ``memfd``: a file without a name that
``/proc/PID/fd`` still leads to. It is read, never written, and the process is not stopped. What is
read may be one operation old by the time it is printed, or torn when the rank is busy.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dpcore.errors import Error

_NAME = "/memfd:dpcore-arena"
_PAGE = 4096  # control blocks begin on a page
_SEARCHED_BYTES = 4 << 30
_SHOWN = 5  # finished operations
_REDUCING = ("all_reduce", "reduce_scatter", "reduce")
_ROOTED = ("broadcast", "reduce", "gather", "scatter")


def show(pids: Sequence[int], *, as_json: bool) -> int:
    """Prints the black boxes of processes; the exit status."""
    from rich.console import Console

    console = Console(highlight=False)
    status = 0
    for pid in pids:
        try:
            boxes = read(pid)
        except Error as problem:
            print(f"dpcore inspect: {problem}", file=sys.stderr)
            status = 1
            continue
        for box in boxes:
            if as_json:
                print(json.dumps(box))
                continue
            for line, style in _lines(box):
                console.print(line, style=style or None, markup=False, soft_wrap=True)
    return status


def read(pid: int) -> list[dict[str, Any]]:
    """The black box of every communicator that is open in a process of this host.

    Several where ranks are threads, or groups were split; the one of ``init()`` comes first.
    """
    boxes = []
    for descriptor in _arenas(pid):
        try:
            boxes += list(_Arena(pid, descriptor).boxes())
        finally:
            os.close(descriptor)
    if not boxes:
        raise Error(
            f"process {pid} has no dpcore communicator: it is no rank, or not yet past init(), or "
            "a forked child of one"
        )
    return boxes


def _arenas(pid: int) -> Iterator[int]:
    """Descriptors of the arenas that a process owns. The caller closes them."""
    directory = f"/proc/{pid}/fd"
    try:
        for name in sorted(os.listdir(directory), key=int):
            path = f"{directory}/{name}"
            try:
                if os.readlink(path).startswith(_NAME):
                    yield os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue  # closed in the meantime
    except FileNotFoundError:
        raise Error(f"there is no process {pid} on this host") from None
    except PermissionError:
        raise Error(f"process {pid} belongs to somebody else; try sudo") from None


class _Arena:
    """An open arena and the layout of what is in it."""

    def __init__(self, pid: int, descriptor: int) -> None:
        from dpcore import _C

        self._pid = pid
        self._descriptor = descriptor
        self._layout = _C.control_layout()
        self._bytes = os.fstat(descriptor).st_size
        self._now_ns = time.monotonic_ns()

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
            "rank": control["rank"],
            "world_size": control["world"],
            "communicator": origin,
            "operations_entered": control["operations_seen"],
            "finalized": bool(control["left"]),
            "in_flight": [entry for entry in operations if "took_ms" not in entry],
            "finished": [entry for entry in operations if "took_ms" in entry][-_SHOWN:],
            "abort": self._abort(offset),
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
        record = self._struct("abort", control_at + self._layout["control"]["abort"][0])
        if record is None or record["state"] != 2:
            return None
        return {
            "error": self._name("errors", record["kind"]),
            "culprit": record["culprit"],
            "reason": record["reason"],
            "seconds_ago": self._seconds_since(record["when_ns"]),
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
            elif field == "reason":
                fields[field] = piece.split(b"\0")[0].decode(errors="replace")
            elif size <= 8:
                fields[field] = int.from_bytes(piece, sys.byteorder, signed=signed)
        return fields

    def _name(self, table: str, number: int) -> str:
        names: list[str] = self._layout[table]
        return names[number] if number < len(names) else str(number)

    def _seconds_since(self, when_ns: int) -> float:
        return round((self._now_ns - when_ns) * 1e-9, 3)


# ---- as text ---------------------------------------------------------------------------------


def _lines(box: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    group = "" if box["communicator"] == "init" else " of a group made by split()"
    state = ", finalized" if box["finalized"] else ""
    yield (
        f"process {box['pid']}: rank {box['rank']} of {box['world_size']}{group}{state}, "
        f"{box['operations_entered']} operations entered",
        "bold",
    )
    abort = box["abort"]
    if abort is not None:
        blamed = f", rank {abort['culprit']} is to blame" if abort["culprit"] >= 0 else ""
        yield f"  gave up {abort['seconds_ago']:.1f} s ago: {abort['error']}{blamed}", "bold red"
        yield f"    {abort['reason']}", "red"
    for entry in box["in_flight"]:
        verb = "was in flight" if abort is not None else "in flight"
        yield f"  {verb} for {entry['since_seconds']:.1f} s: {_text(entry)}", "yellow"
    if not box["in_flight"]:
        yield "  nothing in flight", ""
    for entry in reversed(box["finished"]):
        yield (
            f"  finished {entry['seconds_ago']:.1f} s ago, took {entry['took_ms']:.3f} ms: "
            f"{_text(entry)}",
            "dim",
        )


def _text(entry: Mapping[str, Any]) -> str:
    text = f"operation {entry['number']} ({entry['collective']}"
    if "count" in entry:
        text += f" of {entry['count']} x {entry['dtype']}"
    if "op" in entry:
        text += f", {entry['op']}"
    if "root" in entry:
        text += f", root {entry['root']}"
    return text + ")"
