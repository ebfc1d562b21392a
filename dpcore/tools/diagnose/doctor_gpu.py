"""What ``dpcore doctor`` says of GPUs: driver, torch, our own kernels, NCCL."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from dpcore.tools.diagnose.finding import BUILD_AGAIN, Finding

_DRIVER = Path("/proc/driver/nvidia/version")
_DRIVER_DEVICE = Path("/dev/nvidiactl")


def driver_release() -> str | None:
    """The release of the NVIDIA driver, as far as the kernel tells it; None without a driver."""
    if _DRIVER.exists():
        found = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)", _DRIVER.read_text())
        return found[1] if found else "of unknown release"
    return "of unknown release" if _DRIVER_DEVICE.exists() else None


def try_gpus() -> dict[str, Any]:
    """What ``cuda`` judges. For a process of its own: it leaves a context on every GPU."""
    import torch

    from dpcore import _C

    usable = torch.cuda.is_available()
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count() * usable)]
    return {**_C.cuda_probe(), "names": names}


def cuda(answer: dict[str, Any] | None) -> Finding:
    """``answer``: of ``try_gpus``, or its error; None where there was nothing to ask, or nobody."""
    release = driver_release()
    if release is None:
        return Finding(
            "CUDA", "missing", "no NVIDIA driver",
            "only for training on GPUs: install the driver, then nvidia-smi lists the GPU; "
            "a container gets it by docker run --gpus all",
        )  # fmt: skip
    driver = f"driver {release}"
    if answer is None:
        return Finding(
            "CUDA", "missing", f"{driver}; GPUs are not tried, since the core does not load",
            f"first the core: {BUILD_AGAIN}",
        )  # fmt: skip
    import torch

    if torch.version.cuda is None:
        return Finding(
            "CUDA", "missing", f"{driver}, but torch is built for CPUs",
            f"to train on the GPU: pip install --force-reinstall torch, then {BUILD_AGAIN}",
        )  # fmt: skip
    text = f"{driver}, torch for CUDA {torch.version.cuda}"
    problem = answer.get("error") or answer["problem"]
    if problem:
        advice = _against(problem, built=answer.get("built", True))
        return Finding("CUDA", "missing", f"{text}: {problem}", advice, details=answer)
    if not answer["names"]:
        advice = "python -c 'import torch; torch.cuda.init()' says why, nvidia-smi what is there"
        return Finding("CUDA", "missing", f"{text}: torch finds no usable GPU", advice)
    return Finding("CUDA", "ok", f"{text}, {', '.join(answer['names'])}", details=answer)


def _against(problem: str, *, built: bool) -> str:
    """What to do about a GPU that does not run our kernels."""
    if not built:
        toolkit = "with nvcc of CUDA 12.5 or newer in PATH, or CUDA_HOME set"
        return f"{toolkit}: DPCORE_CUDA=1 {BUILD_AGAIN}"
    lacking = re.search(r"DPCORE_CUDA_ARCHS=\d+", problem)
    if lacking:
        return f"{lacking[0]} {BUILD_AGAIN}"
    return "nvidia-smi shows what the driver sees and who uses it; then dpcore doctor again"


def nccl() -> Finding:
    """The library that ``backend="nccl"`` takes, found as it finds it, or where it looked."""
    from dpcore.comm.communicators.nccl import nccl_library

    try:
        found = nccl_library()
    except ImportError:
        return Finding(
            "NCCL", "missing", "not looked for, since the core does not load",
            f"first the core: {BUILD_AGAIN}",
        )  # fmt: skip
    if found["problem"]:
        places = found["problem"].partition("\nInstall")[0]  # in the core's words
        return Finding(
            "NCCL", "missing", places,
            "only for training on several GPUs: pip install nvidia-nccl-cu13 (nvidia-nccl-cu12 for "
            "a torch of CUDA 12), or DPCORE_NCCL_LIBRARY=<path of libnccl.so.2>",
        )  # fmt: skip
    text = f"{found['version']}, {found['path']} ({found['found_by']})"
    return Finding("NCCL", "ok", text, details=found)
