"""Programs of C++ that tests run: built by make, once, and run under their sanitizer.

    python -m tests.cpp.programs        builds all of them, as `make test` does before it begins

There is no suppression file: what a sanitizer reports is a fault.
"""

import functools
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = ROOT / "build" / "cpp" / "libfake_nccl.so"  # for NCCL
PROGRAMS = (
    "asan/stress", "asan/frames", "asan/geometry", "asan/flow", "asan/runs", "asan/handover",
    "asan/processors", "asan/way_to_peers", "asan/meeting", "asan/launches", "asan/agreement",
    "asan/blocks",
    "tsan/stress", "tsan/frames", "tsan/handover", "tsan/streams", "tsan/barriers", "tsan/blocks",
    "entered/entered", STAND_IN.name,
)  # fmt: skip
OPTIONS = {
    "asan": {"ASAN_OPTIONS": "detect_leaks=1", "UBSAN_OPTIONS": "print_stacktrace=1"},
    "tsan": {"TSAN_OPTIONS": "halt_on_error=1 second_deadlock_stack=1"},
}


def _make(names, *variables):
    command = ["make", "-s", "-j2", *(f"build/cpp/{name}" for name in names), *variables]
    subprocess.run(command, cwd=ROOT, check=True, timeout=1500)


@functools.cache
def built(name):
    """The path of a program, "FLAVOUR/NAME", which takes minutes to build the first time."""
    _make([name])
    return ROOT / "build" / "cpp" / name


def run(program, *arguments, says=""):
    """What it says; it ends well, without a report, and has said so."""
    done = subprocess.run(
        [program, *map(str, arguments)],
        capture_output=True, text=True, timeout=600,
        env={**os.environ, **OPTIONS[program.parent.name]},
    )  # fmt: skip
    assert done.returncode == 0, f"{arguments}:\n{done.stdout}\n{done.stderr[-6000:]}"
    assert says in done.stdout
    return done.stdout


# ---- what is compiled for GPUs, over a stand-in for CUDA -----------------------------------------


def kernels_of_the_module():
    """The folder in which setup.py has put what nvcc made, or why there is none."""
    import torch

    from dpcore import _C

    if _C.cuda_probe()["runtime_version"] == 0:
        return None, "this dpcore was built without CUDA: there are no kernels to run"
    tag = f"{sys.implementation.cache_tag}-{platform.machine()}-torch{torch.__version__}"
    flavour = "debug" if os.environ.get("DPCORE_DEBUG") == "1" else "release"
    folder = ROOT / "build" / "objects" / f"{tag}-{flavour}-cuda"
    if not (folder / "cuda" / "kernels.o").exists():
        return None, "dpcore was not built in this folder: its objects are elsewhere"
    return folder, ""


def _include_of_cuda(module):
    """Where nvcc has found its headers: it may be a script that leads elsewhere."""
    text = (module / "cuda" / "device_cuda.d").read_text()
    (header,) = set(re.findall(r"\S+/cuda_runtime_api\.h", text))
    return os.path.dirname(os.path.realpath(header))


@functools.cache
def built_with_kernels(module):
    _make(["tsan/gpus"], f"MODULE={module}", f"CUDA_INCLUDE={_include_of_cuda(module)}")
    return ROOT / "build" / "cpp" / "tsan" / "gpus"


if __name__ == "__main__":
    _make(PROGRAMS)
    module, _ = kernels_of_the_module()
    if module:
        built_with_kernels(module)
