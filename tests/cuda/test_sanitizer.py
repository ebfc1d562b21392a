"""Our kernels under compute-sanitizer: memory, races within a block, what is read unwritten."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
FOUND = 9


@pytest.mark.timeout(420)
@pytest.mark.skipif(
    shutil.which("compute-sanitizer") is None, reason="no compute-sanitizer in PATH"
)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck"])
def test_nothing_is_found(tool):
    # Of all that is launched, only our kernels are looked at. To initcheck what other kernels have
    # written is unwritten then: it sees what was copied to the device.
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", str(FOUND)]
    command += ["--kernel-name", "kernel_substring=dpcore"]
    command += [sys.executable, "-m", "tests.cuda.sanitized"]
    command += {"memcheck": ["--fused"], "initcheck": ["--reductions"]}.get(tool, [])
    # The tool works on each kernel that is loaded: not on all of torch's.
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_MODULE_LOADING": "LAZY"}
    out = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400
    )
    if "Device not supported" in out.stdout + out.stderr:
        pytest.skip("compute-sanitizer does not support this device, or not in this container")
    assert out.returncode == 0, (out.stdout + out.stderr)[-6000:]
    assert "done" in out.stdout
