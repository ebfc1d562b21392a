"""For which GPUs the module was compiled, as the commands beside its objects say."""

import os
import platform
import re
import sys

import pytest
import torch

from dpcore import _C
from tools.gpu_machine import ROOT, find_tool

WANTED = {"80", "90", "100"}  # A100, H100 and H200, B200
FLAVOUR = "debug" if os.environ.get("DPCORE_DEBUG") == "1" else "release"
OBJECTS = (
    ROOT
    / "build"
    / "objects"
    / f"{sys.implementation.cache_tag}-{platform.machine()}-torch{torch.__version__}-{FLAVOUR}-cuda"
    / "cuda"
)


@pytest.mark.skipif(find_tool("nvcc") is None, reason="there is no nvcc")
@pytest.mark.skipif(os.environ.get("DPCORE_CUDA") == "0", reason="DPCORE_CUDA=0")
@pytest.mark.skipif(
    bool(os.environ.get("DPCORE_CUDA_ARCHS")), reason="DPCORE_CUDA_ARCHS says for which"
)
def test_every_kernel_was_compiled_for_three_architectures():
    if not OBJECTS.is_dir():
        pytest.skip(f"the module was not built in this folder: there is no {OBJECTS}")
    assert _C.cuda_probe()["built"]
    for source in sorted((ROOT / "csrc" / "cuda").rglob("*.cu")):
        command = (OBJECTS / f"{source.stem}.command").read_text()
        assert source.relative_to(ROOT).as_posix() in command
        assert (OBJECTS / f"{source.stem}.o").stat().st_size > 0
        machine_code = set(re.findall(r"sm_(\d+)", command))
        assert machine_code >= WANTED, f"built with DPCORE_CUDA_ARCHS? Build again: {command}"
        newest = max(WANTED, key=int)
        assert f"compute_{newest}]" in command, "no PTX for GPUs that come later"
