"""The machine that numbers were measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any


def machine() -> dict[str, Any]:
    """A description of the machine: its processor and versions."""
    model = platform.machine()
    try:
        with open("/proc/cpuinfo") as lines:
            names = (line.partition(":")[2].strip() for line in lines if "model name" in line)
            model = next(names, model)
    except OSError:
        pass
    return {
        "processor": model,
        "processors": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}",
        **clock(),
    }


def clock(folder: Path = Path("/sys/devices/system/cpu")) -> dict[str, Any]:
    """What decides how fast the processors' clock runs, and how fast it does, as a share of the
    most: nothing where the system does not say, as in most virtual machines."""
    found: dict[str, Any] = {}
    shares = []
    for place in sorted(folder.glob("cpu[0-9]*/cpufreq")):
        try:
            found["governor"] = (place / "scaling_governor").read_text().strip()
            now, most = (
                int((place / name).read_text()) for name in ("scaling_cur_freq", "cpuinfo_max_freq")
            )
        except (OSError, ValueError):
            continue
        shares.append(now / most)
    if shares:
        found["pace"] = round(min(1.0, sum(shares) / len(shares)), 2)
    return found


def commit_of(folder: Path) -> str:
    """The commit of the git working tree around a folder, or "". It is read from git's own files,
    because a program that communicates should not start another process."""
    try:
        for place in (folder, *folder.parents):
            git = place / ".git"
            if git.is_file():  # of a worktree
                git = place / git.read_text().partition("gitdir:")[2].strip()
            if (git / "HEAD").is_file():
                return _head(git)
    except OSError:
        pass
    return ""


def _head(git: Path) -> str:
    name = (git / "HEAD").read_text().strip()
    if not name.startswith("ref: "):
        return name
    name = name.removeprefix("ref: ")
    common = git / "commondir"  # where a worktree's branches are
    shared = git / common.read_text().strip() if common.is_file() else git
    if (shared / name).is_file():
        return (shared / name).read_text().strip()
    packed = (shared / "packed-refs").read_text().splitlines()
    return next((line.split()[0] for line in packed if line.endswith(f" {name}")), "")
