"""What ``dpcore doctor`` looks at: a function per topic. None leaves a change behind."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import platform
import resource
import socket
import struct
from pathlib import Path

from dpcore.base.core_choice import NoCore, how_to_install_torch
from dpcore.tools.diagnose.doctor_gpu import nccl
from dpcore.tools.diagnose.doctor_links import links, text_of
from dpcore.tools.diagnose.doctor_mpi import mpi
from dpcore.tools.diagnose.finding import BUILD_AGAIN, Check, Finding, version_of
from dpcore.tools.hosts import CONGESTION_CONTROL, why_not

_GIB = 1 << 30
_SIOCGIFADDR = 0x8915
_IPV6_ADDRESSES, _GLOBAL = Path("/proc/net/if_inet6"), "00"
_FEW_DESCRIPTORS = 1024
_CONGESTION = Path(CONGESTION_CONTROL)
_PAUSING = "bbr"


def compiled_core() -> Finding:
    """Can the compiled module be loaded, and with which torch?"""
    try:
        from dpcore import _C
    except NoCore as problem:
        return Finding("core", "trouble", "not loaded", str(problem))
    except ImportError as problem:
        return Finding(
            "core",
            "trouble",
            f"the compiled module does not load: {problem}",
            f"build it against this torch: {BUILD_AGAIN} (dpcore show, simulate and "
            "dpcore.reference work without it)",
        )
    import torch

    where = "/".join(Path(_C.__file__).parts[-2:])
    return Finding("core", "ok", f"{where}, with torch {torch.__version__}")


def torch_build() -> Finding:
    if importlib.util.find_spec("torch") is None:
        return Finding("torch", "trouble", "not installed", how_to_install_torch())
    import torch

    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for CPUs"
    return Finding(
        "torch", "ok", f"{torch.__version__}, {built}, Python {platform.python_version()}"
    )


def processors() -> Finding:
    usable: float = len(os.sched_getaffinity(0))
    text = f"{usable} of {os.cpu_count()} may be used"
    quota = _cgroup("cpu.max").split()
    if len(quota) == 2 and quota[0] != "max":
        limit = int(quota[0]) / int(quota[1])
        text += f", {limit:.1f} by the limit of the container"
        usable = min(usable, limit)
    if usable < 2:
        return Finding(
            "processors", "missing", text,
            "ranks take turns: nothing is hidden behind computation, and timings mean little. "
            "taskset -cp $$ shows which ones are allowed, docker run --cpus 2 allows more",
        )  # fmt: skip
    return Finding("processors", "ok", text, details={"usable": usable})


def memory() -> Finding:
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = (int(lines[name].split()[0]) << 10 for name in ("MemTotal", "MemAvailable"))
    limit = _cgroup("memory.max")
    text = f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB free"
    if limit.isdigit():
        text += f", {int(limit) / _GIB:.1f} GiB by the limit of the container"
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space != resource.RLIM_INFINITY:
        return Finding(
            "memory", "missing", f"{text}; addresses are limited to {space / _GIB:.0f} GiB",
            "a rank maps its own arena and those of its local peers: ulimit -v unlimited",
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
        with socket.socket(socket.AF_UNIX) as rendezvous:
            rendezvous.bind(b"\0dpcore-doctor-%d" % os.getpid())
    except (OSError, AttributeError) as problem:
        return Finding(
            "kernel", "trouble", f"{platform.release()}: {problem}",
            "Linux 5.3 or newer is needed (uname -r), and a sandbox has to allow memfd_create, "
            "pidfd_open and abstract Unix sockets: docker run --security-opt seccomp=unconfined "
            "shows whether it is the sandbox",
        )  # fmt: skip
    return Finding("kernel", "ok", f"Linux {platform.release()}: memfd, pidfd, abstract sockets")


def cupy() -> Finding:
    names = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
    found = [(name, version) for name in names if (version := version_of(name))]
    if not found:
        return Finding(
            "CuPy", "missing", "not installed",
            'only for backend="cupy": pip install cupy-cuda13x (cupy-cuda12x for CUDA 12)',
        )  # fmt: skip
    return Finding("CuPy", "ok", ", ".join(f"{name} {version}" for name, version in found))


def namespaces() -> Finding:
    """What the benchmarks on shaped links need: two hosts on one machine. One is made, and removed
    again."""
    if reason := why_not():
        return Finding(
            "namespaces", "missing", f"a shaped link {reason}",
            "only for benchmarks between two network namespaces: apt-get install iproute2, and run "
            "them with sudo, in a container with --privileged; "
            'dpcore.init(link="1gbit,50us") emulates a link without',
        )  # fmt: skip
    return Finding("namespaces", "ok", "network namespaces can be made, links can be shaped")


def interfaces() -> Finding:
    """Where ranks of other hosts could connect to."""
    of_ipv6 = _ipv6_addresses()
    names = [name for _, name in socket.if_nameindex()]
    found = {name: _address_of(name) or of_ipv6.get(name, "") for name in names}
    shown = ", ".join(f"{name} {address or 'without address'}" for name, address in found.items())
    outside = [name for name, address in found.items() if address and name != "lo"]
    if not outside:
        return Finding(
            "interfaces", "missing", shown,
            "no other host can be reached from here, and a single host needs none: ip addr shows "
            "the NICs, docker run --network host gives a container those of its host",
        )  # fmt: skip
    return Finding("interfaces", "ok", shown, details=found)


def tcp() -> Finding:
    """By which rule connections to other hosts find out how fast to send."""
    chosen = text_of(_CONGESTION)
    if not chosen:
        return Finding("TCP", "ok", "the kernel does not tell its congestion control")
    text = f"congestion control {chosen}"
    if chosen == _PAUSING:
        return Finding(
            "TCP", "missing", text,
            "a connection that is never idle pauses for 200 ms every ten seconds: for training "
            "over several hosts, sysctl -w net.ipv4.tcp_congestion_control=cubic on each of them",
        )  # fmt: skip
    return Finding("TCP", "ok", text)


def drawing() -> Finding:
    version = version_of("matplotlib")
    if not version:
        advice = "only for dpcore show --png and plots: pip install matplotlib"
        return Finding("matplotlib", "missing", "not installed", advice)
    return Finding("matplotlib", "ok", version)


CHECKS: tuple[Check, ...] = (
    torch_build,
    processors,
    memory,
    descriptors,
    kernel,
    namespaces,
    interfaces,
    tcp,
    links,
    drawing,
    mpi,
    cupy,
    nccl,
)  # and cuda, which waits for another process


def _address_of(interface: str) -> str:
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, request)
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def _ipv6_addresses() -> dict[str, str]:
    """By interface; only addresses that other hosts can reach."""
    try:
        lines = [line.split() for line in _IPV6_ADDRESSES.read_text().splitlines()]
    except OSError:
        return {}
    return {
        name: socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address))
        for address, _, _, scope, _, name in lines
        if scope == _GLOBAL
    }


def _cgroup(name: str) -> str:
    """A limit of the container; of version 2, as every current system has it."""
    return text_of(Path("/sys/fs/cgroup", name))
