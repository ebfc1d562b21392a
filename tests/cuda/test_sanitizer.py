"""Our kernels under compute-sanitizer: memory, races within a block, what is read unwritten."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.gpu_machine import SANITIZER, SANITIZER_TOOLS, find_tool

ROOT = Path(__file__).resolve().parent.parent.parent
FOUND = 9
KILLED = (-9, 128 + 9)
SECONDS = float(os.environ.get("DPCORE_SANITIZER_SECONDS", "400"))  # of each tool


@pytest.mark.timeout(SECONDS + 5)
@pytest.mark.skipif(
    find_tool(SANITIZER) is None, reason="no compute-sanitizer in PATH or $CUDA_HOME/bin"
)
@pytest.mark.parametrize("tool", SANITIZER_TOOLS)
def test_nothing_is_found(tool):
    # With all that it starts: the program that it looks into is not left on the GPU.
    command = ["timeout", "--signal=KILL", str(SECONDS)]
    command += [find_tool(SANITIZER), "--tool", tool, "--error-exitcode", str(FOUND)]
    # Of all that is launched, only our kernels are looked at. To initcheck what other kernels have
    # written is unwritten then: it sees what was copied to the device.
    command += ["--kernel-name", "kernel_substring=dpcore"]
    command += [sys.executable, "-m", "tests.cuda.every_kernel"]
    # Under memcheck a call for one rank waits until the other rank's stream has passed, if both are
    # threads of one process.
    command += {"initcheck": ["--reductions"], "memcheck": ["--processes"]}.get(tool, [])
    # The tool works on each kernel that is loaded: not on all of torch's.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_MODULE_LOADING": "LAZY"}
    out = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if "Device not supported" in out.stdout + out.stderr:
        pytest.skip("compute-sanitizer does not support this device, or not in this container")
    assert out.returncode not in KILLED, f"{tool} took longer than {SECONDS:.0f} s: {out.stdout}"
    assert out.returncode == 0, (out.stdout + out.stderr)[-6000:]
    assert "done" in out.stdout
