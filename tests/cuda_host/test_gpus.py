"""What is compiled for GPUs runs without one: over a stand-in for the CUDA runtime and driver, with
the module's own kernels, on devices of the host whose memory its threads can't touch."""

import pytest

from tests.cpp import programs
from tests.cpp.programs import STAND_IN

pytestmark = pytest.mark.timeout(1800)  # the first builds the program

MEMORY = {"threads": ["auto", "descriptor"], "processes": ["descriptor", "ipc"]}
RANKS = ((2, 1, "stream"), (2, 2, "fused"), (3, 3, "stream"), (4, 4, "fused"))
WAYS = [
    (mode, world, gpus, barrier, memory)
    for mode in ("threads", "processes")
    for world, gpus, barrier in RANKS
    for memory in MEMORY[mode]
]


@pytest.fixture(scope="module")
def program():
    module, problem = programs.kernels_of_the_module()
    if problem:
        pytest.skip(problem)
    return programs.built_with_kernels(module)


@pytest.mark.parametrize("what", ["device", "late", "fallbacks", "killed stream", "killed fused"])
def test_a_device_and_its_faults(program, what):
    name, *more = what.split()
    programs.run(program, name, *more, says=f"{name}: fine")


@pytest.mark.parametrize("world", [1, 3])
def test_nccl_in_streams_of_cuda(program, world, stand_in, monkeypatch):
    monkeypatch.setenv("DPCORE_NCCL_LIBRARY", str(STAND_IN))
    programs.run(program, "nccl", world, says="nccl: fine")


@pytest.mark.parametrize("world", [2, 3])
def test_a_captured_step_is_replayed(program, world):
    programs.run(program, "graph", world, says="graph: fine")


@pytest.mark.parametrize(("mode", "world", "gpus", "barrier", "memory"), WAYS)
def test_ranks_by_every_way_to_meet_and_to_hand_over_memory(
    program, mode, world, gpus, barrier, memory
):
    """Collectives, messages, groups and traces; and nothing is left behind."""
    programs.run(program, mode, world, gpus, barrier, memory, says=f"{mode}: fine")
