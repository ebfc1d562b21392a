"""The machine that numbers were measured on."""

from __future__ import annotations

import os
import platform
from typing import Any


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
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
    }
