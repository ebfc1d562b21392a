"""The rounds of a comparison as they are measured, so that an interrupted one can go on.

A file of JSON lines: first what was measured, then a line per round, then per cell what the
wrappers chose. A run that measures the same thing goes on behind the last round, one that measures
something else begins anew.
"""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import Any, TextIO

from dpcore.errors import Unsupported


class Store:
    """``rounds`` and ``results`` by the key of a cell."""

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self._path = path
        self._file: TextIO | None = None  # with a lock, for as long as this process measures
        self.rounds: dict[str, list[dict[str, Any]]] = {}
        self.results: dict[str, dict[str, Any]] = {}
        self._header = {"comparison": json.loads(json.dumps(identity))}
        lines = _lines(path)
        if lines and lines[0] == self._header:
            for line in lines[1:]:
                self._take(line)

    @property
    def begun(self) -> int:
        return sum(map(len, self.rounds.values()))

    def is_complete(self, keys: list[str], rounds: int) -> bool:
        return all(len(self.rounds.get(key, [])) >= rounds for key in keys)

    def begin_anew(self) -> None:
        self.rounds, self.results = {}, {}

    def open(self) -> None:
        """Writes what is kept: the end of a run that was killed may be half a line."""
        lines: list[dict[str, Any]] = [self._header]
        for key, rounds in self.rounds.items():
            lines += [{"cell": key, "round": round_} for round_ in rounds]
        lines += [{"cell": key, "result": result} for key, result in self.results.items()]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._path.open("a", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Unsupported(
                f"another comparison writes to {self._path}; name a folder of its own with --out"
            ) from None
        self._file.truncate(0)
        self._write(lines)

    def add(self, **line: Any) -> None:
        self._take(line)
        self._write([line])

    def _write(self, lines: list[dict[str, Any]]) -> None:
        assert self._file is not None
        self._file.write("".join(json.dumps(line) + "\n" for line in lines))
        self._file.flush()

    def close(self) -> None:
        """Others may measure into the same folder."""
        if self._file is not None:
            self._file.close()

    def _take(self, line: dict[str, Any]) -> None:
        cell = line.get("cell")
        if isinstance(cell, str) and "round" in line:
            self.rounds.setdefault(cell, []).append(line["round"])
        elif isinstance(cell, str) and "result" in line:
            self.results[cell] = line["result"]


def _lines(path: Path) -> list[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    found = []
    for line in text.splitlines():
        try:
            found.append(json.loads(line))
        except (ValueError, RecursionError):
            break
    return [line for line in found if isinstance(line, dict)]
