"""Which NCCL there is: where the wheels put it, and what the core has found.

The core looks in this order: the path in ``DPCORE_NCCL_LIBRARY``, a library that the process has
loaded already (torch's), the wheels, the system (``csrc/cuda/nccl/nccl_library.h``).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any


def wheel_libraries() -> list[str]:
    """Paths of libnccl.so.2 in the wheels ``nvidia-nccl-cu13`` and ``nvidia-nccl-cu12``. The wheels
    of several versions share one folder, so what lies there is the one installed last."""
    try:
        found = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):
        return []
    if found is None:
        return []
    places = [Path(folder) for folder in found.submodule_search_locations or []]
    libraries = [place / "nccl" / "lib" / "libnccl.so.2" for place in places]
    return [str(path) for path in libraries if path.is_file()]


def nccl_library() -> dict[str, Any]:
    """``path``, ``version`` (as text) and ``found_by`` of the NCCL that ``backend="nccl"`` uses, or
    ``problem``: why there is none, with every place that was looked at. Needs no GPU."""
    import torch  # noqa: F401  (the compiled module needs its libraries)

    from dpcore import _C
    from dpcore.errors import Unsupported

    try:
        found = _C.nccl_library(wheel_libraries())
    except Unsupported as problem:
        return {"path": None, "version": None, "found_by": None, "problem": str(problem)}
    number = found["version"]
    version = f"{number // 10000}.{number % 10000 // 100}.{number % 100}"
    return {**found, "version": version, "problem": ""}
