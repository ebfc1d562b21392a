"""Where NCCL is looked for, and what is said when it is not there. Each case in a process of its
own, since a process keeps the library that it found first."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch.distributed as dist

from tests.cpp.programs import ROOT, STAND_IN
from tests.ranks import python

ASK = "import json; from dpcore import nccl_library; print(json.dumps(nccl_library()))"


def started(*words, **options):
    """As ``python.run``, by a Python whose loader reads the environment."""
    return subprocess.run([sys.executable, *words], **options)


def answer(code=ASK, path=(), run=python.run, **environment):
    env = {name: value for name, value in os.environ.items() if name != "DPCORE_NCCL_LIBRARY"}
    env |= {"PYTHONPATH": os.pathsep.join([*map(str, path), str(ROOT)]), **environment}
    out = run("-c", code, env=env, capture_output=True, text=True, check=True, timeout=120)
    return json.loads(out.stdout.splitlines()[-1])


@pytest.mark.usefixtures("stand_in")
def test_the_environment_wins():
    found = answer(DPCORE_NCCL_LIBRARY=str(STAND_IN))
    expected = {"path": str(STAND_IN), "version": "2.27.3", "found_by": "DPCORE_NCCL_LIBRARY"}
    assert found == {**expected, "problem": ""}


@pytest.mark.skipif(
    dist.is_nccl_available(), reason="this torch needs NCCL itself and would take the stand-in"
)
@pytest.mark.usefixtures("stand_in")
def test_a_library_that_is_loaded_already_goes_before_a_wheel(tmp_path):
    for name in ("wheel", "loaded"):
        folder = tmp_path / name / "nvidia" / "nccl" / "lib"
        folder.mkdir(parents=True)
        shutil.copy(STAND_IN, folder / "libnccl.so.2")
    wheel = tmp_path / "wheel" / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    loaded = tmp_path / "loaded" / "nvidia" / "nccl" / "lib" / "libnccl.so.2"
    found = answer(path=[tmp_path / "wheel"])
    assert (found["path"], found["found_by"]) == (str(wheel), "a wheel of NCCL")
    first = f"import ctypes; held = ctypes.CDLL({str(loaded)!r}); {ASK}"
    again = answer(first, path=[tmp_path / "wheel"])
    assert (again["path"], again["found_by"]) == (str(loaded), "already loaded")


def test_without_any_every_place_is_named():
    found = answer(DPCORE_NCCL_LIBRARY="/nowhere/libnccl.so.2")
    assert found["path"] is None
    assert found["problem"].startswith("NCCL was not found:\n  /nowhere/libnccl.so.2 (DPCORE_NCCL")
    assert "cannot open shared object file" in found["problem"]
    assert "nvidia-nccl-cu13" in found["problem"]


def test_a_library_that_is_something_else():
    # None of torch's: with a torch for CUDA, NCCL is found in what they depend on.
    found = answer(DPCORE_NCCL_LIBRARY="libm.so.6")
    assert "it lacks ncclGetVersion, ncclGetUniqueId" in found["problem"]


def real_wheel():
    spec = importlib.util.find_spec("nvidia")
    places = spec.submodule_search_locations if spec else []
    return [p for p in places or [] if os.path.exists(f"{p}/nccl/lib/libnccl.so.2")]


@pytest.mark.skipif(not real_wheel(), reason="needs the wheel nvidia-nccl-cu13 or -cu12")
def test_the_real_library_opens_without_a_gpu():
    found = answer()
    assert found["problem"] == ""
    assert tuple(map(int, found["version"].split("."))) >= (2, 14, 0)
    assert found["path"].endswith("libnccl.so.2")
    assert found["found_by"] == (
        "already loaded" if dist.is_nccl_available() else "a wheel of NCCL"
    )
