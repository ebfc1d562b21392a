"""What setup.py compiles the core for: a torch, and a Python, which need not be those that run it.

DPCORE_TARGET_TORCH names a folder with the headers of a torch (tools/compile_matrix.py fetches
them) and DPCORE_TARGET_PYTHON an interpreter; tools/wheels.py sets both.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TORCH_LIBRARIES = ("c10", "torch", "torch_cpu", "torch_python")


def minor_of(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])


@dataclass
class Target:
    """What the module is compiled for: a torch, and a Python."""

    torch: str
    torch_includes: list[str]
    torch_libraries: str
    python_include: str
    suffix: str  # of the module's file, as in ".cpython-311-x86_64-linux-gnu.so"
    cache_tag: str

    @property
    def module(self) -> str:
        return "dpcore._cores.torch{}_{}._C".format(*minor_of(self.torch))


def find_target(torch: Any) -> Target:
    """The torch and the Python that run this, unless the environment names others."""
    from torch.utils import cpp_extension

    python = os.environ.get("DPCORE_TARGET_PYTHON", sys.executable)
    query = "import json, sys, sysconfig as s; print(json.dumps([s.get_path('include'), "
    query += "s.get_config_var('EXT_SUFFIX'), sys.implementation.cache_tag]))"
    of_python = json.loads(subprocess.check_output([python, "-c", query]))
    if folder := os.environ.get("DPCORE_TARGET_TORCH"):
        version = (Path(folder) / "complete").read_text().strip()
        include = Path(folder).resolve() / "torch" / "include"
        includes = [str(include), str(include / "torch" / "csrc" / "api" / "include")]
        return Target(version, includes, str(stand_ins(Path(folder))), *of_python)
    (libraries,) = cpp_extension.library_paths()[:1]
    return Target(torch.__version__, cpp_extension.include_paths(), libraries, *of_python)


def stand_ins(folder: Path) -> Path:
    """Empty libraries with the names of torch's, which are enough to link against: torch has loaded
    its own before the module is, and what the module takes from them is looked up then."""
    libraries = folder.resolve() / "torch" / "lib"
    libraries.mkdir(parents=True, exist_ok=True)
    for name in TORCH_LIBRARIES:
        file = libraries / f"lib{name}.so"
        if not file.exists():
            command = [os.environ.get("CXX", "g++"), "-shared", f"-Wl,-soname,{file.name}"]
            subprocess.run([*command, "-x", "c++", os.devnull, "-o", str(file)], check=True)
    return libraries
