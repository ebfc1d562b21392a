"""What a machine with a GPU has of all that ``make gpu-check`` needs, and the build there.

Such a machine has often no network: what is missing is named at once and together, and the check
goes on with what is there.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEEDED = {  # without one of these a part of the check is not run
    "torch": "torch>=2.11",
    "setuptools": "setuptools>=77",
    "numpy": "numpy",
    "pytest": "pytest>=8",
    "cloudpickle": "cloudpickle",
}
HELPFUL = {  # without: limits of tests by this tool's own clock; one file is compiled at a time
    "pytest_timeout": "pytest-timeout>=2.3",
    "ninja": "ninja",
}
SANITIZER = "compute-sanitizer"
SANITIZER_TOOLS = ("memcheck", "racecheck", "initcheck")
DRIVER_VERSION = Path("/proc/driver/nvidia/version")
PRINTED = 6000  # characters, of a build that failed


def is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def lacking() -> tuple[list[str], list[str]]:
    """What pip would have to install: what is needed, and what only helps."""
    needed = [wheel for module, wheel in NEEDED.items() if not is_there(module)]
    helpful = [wheel for module, wheel in HELPFUL.items() if not is_there(module)]
    if shutil.which("ninja"):
        helpful = [wheel for wheel in helpful if wheel != "ninja"]
    return needed, helpful


def install_line(wheels: list[str]) -> str:
    quoted = [f'"{wheel}"' if ">" in wheel else wheel for wheel in wheels]
    return " ".join(["python -m pip install", *quoted]) if wheels else ""


def find_tool(name: str) -> str | None:
    """A program of the CUDA toolkit: in PATH, or where setup.py looks for nvcc."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    places = [str(Path(home) / "bin") for home in homes if home]
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(places))


def driver_release(told: Path = DRIVER_VERSION) -> str | None:
    """ "580.95.05": of the kernel module where it says so, otherwise what nvidia-smi says."""
    if told.is_file():
        found = re.search(r"Kernel Module\b.*?\s(\d+(?:\.\d+)+)\s", told.read_text())
        if found:
            return found[1]
    smi = shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path="/usr/local/nvidia/bin")
    if smi is None:
        return None
    command = [smi, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        out = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return out.stdout.split()[0] if out.returncode == 0 and out.stdout.strip() else None


def architecture() -> tuple[str, str]:
    """ "90" for the GPU that torch sees, or "" and why there is none. In a process of its own: one
    that has asked keeps memory of the GPU."""
    code = 'import torch; print("%d%d" % torch.cuda.get_device_capability())'
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if out.returncode == 0:
        return out.stdout.split()[-1], ""
    return "", "torch sees no GPU: " + (out.stderr.strip().splitlines() or ["no reason"])[-1]


def build(log: Path) -> str:
    """Compiles the package in place for this GPU; empty, or why that failed."""
    environment = os.environ | {"DPCORE_CUDA": "1"}
    if not environment.get("DPCORE_CUDA_ARCHS"):
        environment["DPCORE_CUDA_ARCHS"], problem = architecture()
        if problem:
            return problem
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    with log.open("w") as file:
        out = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT
        )
    if out.returncode == 0:
        return ""
    return f"the build failed, see {log}:\n{log.read_text(errors='replace')[-PRINTED:]}"
