"""dpcore doctor on GPUs: which part is not there, and NCCL as the core finds it."""

import os
import time
from pathlib import Path

import pytest
import torch

from dpcore.comm.communicators import nccl
from dpcore.tools.diagnose import doctor, doctor_gpu
from tests.ranks import python

OPEN_DRIVER = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n"
    "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n"
)
OLD_DRIVER = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.163.01  Tue Apr  8 12:41:17 UTC 2025\n"
)


@pytest.fixture
def driver(monkeypatch, tmp_path):
    """A driver of this machine, under torch for CUDA; its version file can be rewritten."""
    version = tmp_path / "version"
    version.write_text(OPEN_DRIVER)
    monkeypatch.setattr(doctor_gpu, "_DRIVER", version)
    monkeypatch.setattr(doctor_gpu, "_DRIVER_DEVICE", tmp_path / "nvidiactl")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    return version


def test_the_release_of_the_driver(driver):
    assert doctor_gpu.driver_release() == "580.65.06"
    driver.write_text(OLD_DRIVER)
    assert doctor_gpu.driver_release() == "550.163.01"
    driver.write_text("something else")
    assert doctor_gpu.driver_release() == "of unknown release"
    driver.unlink()
    assert doctor_gpu.driver_release() is None
    Path(driver.parent, "nvidiactl").touch()  # in a container without /proc/driver
    assert doctor_gpu.driver_release() == "of unknown release"


WORKS = {"built": True, "problem": "", "names": ["H200", "H200"]}
NO_CODE = "CUDA device 0 needs code for sm_70, which this build does not contain: build again with "


@pytest.mark.parametrize(
    ("answer", "state", "text", "step"),
    [
        (WORKS, "ok", "driver 580.65.06, torch for CUDA 13.0, H200, H200", ""),
        (
            WORKS | {"built": False, "problem": "built without CUDA: nvcc was not found"},
            "missing", "built without CUDA", "CUDA 12.5 or newer in PATH, or CUDA_HOME set: "
            "DPCORE_CUDA=1 pip install",
        ),
        (
            WORKS | {"problem": f"{NO_CODE}DPCORE_CUDA_ARCHS=70"},
            "missing", "needs code for sm_70", "DPCORE_CUDA_ARCHS=70 pip install",
        ),
        (
            WORKS | {"problem": "CUDA device 0 does not run a kernel"},
            "missing", "does not run a kernel", "nvidia-smi",
        ),
        (WORKS | {"names": []}, "missing", "torch finds no usable GPU", "torch.cuda.init()"),
        ({"error": "no answer in time"}, "missing", "no answer in time", "nvidia-smi"),
        (None, "missing", "the core does not load", "pip install --no-build-isolation"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("driver")
def test_what_keeps_a_gpu_from_running_our_kernels(answer, state, text, step):
    finding = doctor_gpu.cuda(answer)
    assert finding.state == state
    assert "driver 580.65.06" in finding.text
    assert text in finding.text
    assert step in finding.advice


def test_a_torch_without_cuda_beside_a_driver(driver, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    finding = doctor_gpu.cuda(WORKS)
    assert "torch is built for CPUs" in finding.text
    assert "pip install --force-reinstall torch" in finding.advice
    driver.unlink()
    assert "docker run --gpus all" in doctor_gpu.cuda(None).advice


def test_gpus_are_tried_by_the_core_in_another_process(monkeypatch, driver):
    """What the core says is what is found, and the doctor's own process does not call CUDA."""
    before = torch.cuda.is_initialized()

    def asked():
        return WORKS | {"problem": f"asked {os.getpid()}"}

    monkeypatch.setattr(doctor_gpu, "try_gpus", asked)
    monkeypatch.setattr(doctor, "SelfTest", lambda *_: None)
    findings = {finding.topic: finding for finding in doctor.examine(time.monotonic() + 60)}
    asked_by = findings["CUDA"].text.rpartition("asked ")[2]
    assert int(asked_by) != os.getpid()
    assert torch.cuda.is_initialized() == before


def test_the_answer_is_that_of_the_core():
    if torch.cuda.is_initialized():
        pytest.skip("another test has called CUDA in this process, which can't be forked any more")
    answer = doctor.Child(doctor_gpu.try_gpus)
    try:
        said = answer.answer(time.monotonic() + 120)
    finally:
        answer.end()
    if torch.cuda.is_available():
        assert len(said["names"]) == torch.cuda.device_count()
    else:
        assert said["names"] == []
        assert said["problem"]  # which one, test_cuda_probe.py says


def ask_for_nccl(library):
    """In a process of its own, since a process keeps the library that it found first."""
    code = "from dpcore.tools.diagnose.doctor_gpu import nccl\n"
    code += "f = nccl(); print(f.state, f.text, f.advice)"
    environment = os.environ | {"DPCORE_NCCL_LIBRARY": library}
    out = python.run("-c", code, env=environment, capture_output=True, text=True, timeout=120)
    assert out.returncode == 0, out.stderr
    return out.stdout


def test_nccl_is_the_one_that_the_backend_takes():
    said = ask_for_nccl("/nowhere/libnccl.so.2")
    assert said.startswith("missing NCCL was not found:\n  /nowhere/libnccl.so.2 (DPCORE_NCCL")
    assert "pip install nvidia-nccl-cu13" in said
    assert "it lacks ncclGetVersion" in ask_for_nccl("libm.so.6")


def test_nccl_that_is_there(monkeypatch):
    there = {"path": "/x/libnccl.so.2", "version": "2.27.3", "found_by": "a wheel of NCCL"}
    monkeypatch.setattr(nccl, "nccl_library", lambda: {**there, "problem": ""})
    finding = doctor_gpu.nccl()
    assert (finding.state, finding.text) == ("ok", "2.27.3, /x/libnccl.so.2 (a wheel of NCCL)")


def test_without_the_core_nccl_is_not_looked_for(monkeypatch):
    def no_core():
        raise ImportError("no module named dpcore._C")

    monkeypatch.setattr(nccl, "nccl_library", no_core)
    finding = doctor_gpu.nccl()
    assert finding.state == "missing"
    assert "pip install --no-build-isolation" in finding.advice
