"""What is compiled for GPUs runs without one: over a stand-in for the CUDA runtime and driver, with
the module's own kernels, on devices of the host whose memory its threads can't touch."""

import os
import platform
import re
import subprocess
import sys

import pytest
import torch

from dpcore import _C
from tests.cpp import programs as sanitized
from tests.cuda_host.conftest import ROOT, STAND_IN

pytestmark = pytest.mark.timeout(1800)  # the first builds the program

MEMORY = {"threads": ["auto", "descriptor"], "processes": ["descriptor", "ipc"]}
RANKS = ((2, 1, "stream"), (2, 2, "fused"), (3, 3, "stream"), (4, 4, "fused"))
WAYS = [
    (mode, world, gpus, meeting, memory)
    for mode in ("threads", "processes")
    for world, gpus, meeting in RANKS
    for memory in MEMORY[mode]
]


def objects_of_the_module():
    """Where setup.py has put what nvcc made of the kernels."""
    if _C.cuda_probe()["runtime_version"] == 0:
        pytest.skip("this dpcore was built without CUDA: there are no kernels to run")
    tag = f"{sys.implementation.cache_tag}-{platform.machine()}-torch{torch.__version__}"
    flavour = "debug" if os.environ.get("DPCORE_DEBUG") == "1" else "release"
    folder = ROOT / "build" / "objects" / f"{tag}-{flavour}-cuda"
    if not (folder / "cuda" / "kernels.o").exists():
        pytest.skip("dpcore was not built in this folder: its objects are elsewhere")
    return folder


def include_of_cuda(module):
    """Where nvcc has found its headers: it may be a script that leads elsewhere."""
    text = (module / "cuda" / "device_cuda.d").read_text()
    (header,) = set(re.findall(r"\S+/cuda_runtime_api\.h", text))
    return os.path.dirname(os.path.realpath(header))


@pytest.fixture(scope="module")
def program():
    module = objects_of_the_module()
    include = include_of_cuda(module)
    target = "build/cpp/tsan/gpus"
    command = ["make", "-s", "-j2", target, f"MODULE={module}", f"CUDA_INCLUDE={include}"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=1500)
    return ROOT / target


@pytest.mark.parametrize("what", ["device", "late", "fallbacks", "killed stream", "killed fused"])
def test_a_device_and_its_faults(program, what):
    name, *more = what.split()
    sanitized.run(program, name, *more, says=f"{name}: fine")


@pytest.mark.parametrize("world", [1, 3])
def test_nccl_in_streams_of_cuda(program, world, stand_in, monkeypatch):
    monkeypatch.setenv("DPCORE_NCCL_LIBRARY", str(STAND_IN))
    sanitized.run(program, "nccl", world, says="nccl: fine")


@pytest.mark.parametrize("world", [2, 3])
def test_a_captured_step_is_replayed(program, world):
    sanitized.run(program, "graph", world, says="graph: fine")


@pytest.mark.parametrize(("mode", "world", "gpus", "meeting", "memory"), WAYS)
def test_ranks_by_every_way_to_meet_and_to_hand_over_memory(
    program, mode, world, gpus, meeting, memory
):
    """Collectives, messages, groups and traces; and nothing is left behind."""
    sanitized.run(program, mode, world, gpus, meeting, memory, says=f"{mode}: fine")
