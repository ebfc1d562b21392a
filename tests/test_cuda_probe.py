"""`_C.cuda_probe()` answers on every machine, in every build, in a sentence one can act on."""

import ctypes
import json
import os
from pathlib import Path

import pytest

from tests.ranks import python

KEYS = {"built", "runtime_version", "driver_version", "devices", "problem"}


def has_driver():
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Path("/proc/driver/nvidia/version").exists()
    return True


DRIVER_IS_THERE = has_driver()


def probe_in_process(calls=1, **environment):
    """In a process of its own: a probe that finds a GPU leaves a context behind."""
    # torch first: it loads the libraries that the module is linked against.
    code = "import json, torch; from dpcore import _C\n"
    code += f"for _ in range({calls}): answer = _C.cuda_probe()\n"
    code += "print(json.dumps(answer))"
    out = python.run(
        "-c", code, env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return json.loads(out.stdout)


@pytest.fixture(scope="module")
def probe():
    return probe_in_process()


def test_shape(probe):
    assert set(probe) == KEYS
    assert isinstance(probe["problem"], str)
    # A reason exactly when it cannot be used.
    assert (probe["problem"] == "") == (probe["devices"] > 0 and probe["built"])


def test_build_without_nvcc_says_so(probe):
    if probe["built"]:
        assert probe["runtime_version"] >= 12000
    else:
        assert probe["problem"].startswith("built without CUDA: nvcc was not found at build time")
        assert (probe["runtime_version"], probe["driver_version"], probe["devices"]) == (0, 0, 0)


@pytest.mark.skipif(DRIVER_IS_THERE, reason="this machine has an NVIDIA driver")
def test_machine_without_driver(probe):
    if not probe["built"]:
        pytest.skip("built without CUDA")
    assert (probe["driver_version"], probe["devices"]) == (0, 0)
    assert "no NVIDIA driver on this machine" in probe["problem"]
    assert "install the driver" in probe["problem"]


@pytest.mark.skipif(not DRIVER_IS_THERE, reason="needs an NVIDIA driver")
def test_hidden_devices():
    hidden = probe_in_process(CUDA_VISIBLE_DEVICES="")
    if not hidden["built"]:
        pytest.skip("built without CUDA")
    assert hidden["devices"] == 0
    assert "CUDA_VISIBLE_DEVICES" in hidden["problem"]


def test_it_can_be_called_twice(probe):
    assert probe_in_process(calls=2) == probe
