"""On which machine, commit and day something was measured; files with one JSON line each."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dpcore._version import __version__
from dpcore.base.machine import machine as processors

SCHEMA = 1
ROOT = Path(__file__).resolve().parents[2]  # of the checkout, or what dpcore is installed in


def run_facts(versions: dict[str, dict[str, str]], settings: dict[str, Any]) -> dict[str, Any]:
    """What is the same in every record of a run."""
    return {
        "schema": SCHEMA,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": command_line(),
        "commit": commit(),
        "machine": machine(),
        "python": platform.python_version(),
        "versions": versions,
        "settings": settings,
    }


def append(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Line by line as cells end, so that an interrupted run keeps what it has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def keep(path: Path | None, facts: dict[str, Any], lines: Sequence[dict[str, Any]]) -> None:
    """Appends lines of one cell with the facts of the run and the load of the machine."""
    if path is not None:
        append(path, [facts | {"load": os.getloadavg()[0]} | line for line in lines])


def load(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def program() -> str:
    """The module or script that runs."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec.name if spec else Path(sys.argv[0]).name


def command_line() -> str:
    if program() in ("dpcore", "dpcore.__main__"):
        return shlex.join(["dpcore", *sys.argv[1:]])
    is_module = getattr(sys.modules.get("__main__"), "__spec__", None) is not None
    return shlex.join(["python", *(["-m"] if is_module else []), program(), *sys.argv[1:]])


# What measuring writes: records, and the pages and pictures made of them.
_WRITTEN = (":(exclude)benchmarks/results", ":(exclude)docs/images", ":(exclude,glob)**/*.md")


def commit() -> str:
    """The commit measured, with `+` where the working tree differs from it in more than the records
    and pages that an earlier measurement has written; of an installed package its version."""
    if not (ROOT / ".git").exists():
        return f"of version {__version__}"
    try:
        name = _git("rev-parse", "--short=12", "HEAD")
        changes = _git("status", "--porcelain", "--untracked-files=no", "--", ".", *_WRITTEN)
        return name + ("+" if changes else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def code() -> str:
    """The commit, and of a working tree that differs from it the last change of what runs: rounds
    of two runs belong together only where it is the same."""
    name = commit()
    if not name.endswith("+"):
        return name
    files = [path for end in ("py", "so") for path in (ROOT / "dpcore").rglob(f"*.{end}")]
    return f"{name} {max(path.stat().st_mtime_ns for path in files)}"


def machine() -> dict[str, Any]:
    here = processors()
    return {
        "cpu": here["processor"],
        "cores": here["processors"],
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
    }


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(ROOT), *arguments],
        capture_output=True, text=True, timeout=10, check=True,
    )  # fmt: skip
    return done.stdout.strip()
