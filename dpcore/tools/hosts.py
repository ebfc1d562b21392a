"""Hosts on one machine: network namespaces with an address each, joined by a bridge in another.

A cable keeps the order of what it carries. Linux takes a veth's packets in on the processor that
sent them, so a process that moves between processors overtakes itself, and TCP takes that for a
loss. Each end of a cable therefore takes its packets in on one processor only (rps_cpus).

Needs the rights of root and iproute2. Everything goes when the context ends, and the kernel takes
namespaces away with their last process and name.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import cache
from types import FrameType
from typing import Any

from dpcore.base.link import parse_speed

CONGESTION_CONTROL = "/proc/sys/net/ipv4/tcp_congestion_control"
# The same in all namespaces, on whatever machine. BBR, the default of some, sends next to nothing
# for 200 ms every ten seconds, now in the turn of one contender and now in that of another. reno is
# part of every kernel. And a connection keeps its rate while the others have their turns.
TCP = {CONGESTION_CONTROL: "reno", "/proc/sys/net/ipv4/tcp_slow_start_after_idle": "0"}


_STEERING = "/sys/class/net/{}/queues/rx-0/rps_cpus"


def _processor_of(host: int) -> str:
    """Which takes in what comes to a host; half of them are left to the ranks."""
    usable = sorted(os.sched_getaffinity(0))
    return _mask(usable[host % max(1, len(usable) // 2)])


def _mask(processor: int) -> str:
    """As the kernel wants it.

    >>> _mask(0), _mask(5), _mask(33)
    ('1', '20', '2,00000000')
    """
    words, bit = divmod(processor, 32)
    return f"{1 << bit:x}" + ",00000000" * words


def free_port() -> int:
    """Of this host, at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@cache
def why_not() -> str:
    """Why this machine has no namespaces for us, or nothing."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "needs iproute2 (ip and tc)"
    name = f"dpcore-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode != 0:
        return f"needs the right to make network namespaces: {made.stderr.strip()}"
    try:
        for probe in (
            ["tc", "-n", name, "qdisc", "add", "dev", "lo", *_queue("1gbit", "64kb")],
            ["ip", "-n", name, "link", "add", "type", "veth"],
            ["ip", "-n", name, "link", "add", "type", "bridge"],
        ):
            tried = subprocess.run(probe, capture_output=True, text=True)
            if tried.returncode != 0:
                return f"needs a kernel with tbf, veth and bridge: {tried.stderr.strip()}"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return ""


def _queue(rate: str, burst: str) -> list[str]:
    return ["root", "tbf", "rate", rate, "burst", burst, "latency", "50ms"]


def end_in_order_on_signals() -> None:
    """A terminated run leaves through its `finally` blocks, which end ranks and remove hosts. What
    the caller handles or ignores stays as it is."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        return  # Python sets handlers in the main thread only
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, leave)


_BURSTS = {"100mbit": 32 << 10, "1gbit": 128 << 10, "10gbit": 2 << 20}
_LEAST_OTHER_BURST = 64 << 10
_OTHER_BURST_SECONDS = 1e-3


def burst_of(rate: str) -> str:
    """What a NIC of this rate may send at once, as tc wants it: see Hosts.shape."""
    return f"{burst_bytes(rate)}b"


def burst_bytes(rate: str) -> int:
    """
    >>> burst_bytes("100mbit"), burst_bytes("2500mbit")
    (32768, 312500)
    """
    return _BURSTS.get(rate) or burst_for(rate, _OTHER_BURST_SECONDS, _LEAST_OTHER_BURST)


def burst_for(rate: str, seconds: float, least: int) -> int:
    """Bytes that a link of this rate carries in so long, or the least."""
    return max(least, round(parse_speed(rate).bytes_per_second * seconds))


class Hosts:
    def __init__(self, names: list[str], switch: str) -> None:
        self.names = names
        self.switch = switch

    def address(self, host: int, version: int = 4) -> str:
        return f"10.77.0.{host + 1}" if version == 4 else f"fd77::{host + 1}"

    def inside(self, host: int, *command: str) -> list[str]:
        return ["ip", "netns", "exec", self.names[host], *command]

    def start(
        self, host: int, script: str, environment: dict[str, str], **more: Any
    ) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.inside(host, sys.executable, "-c", script), env={**os.environ, **environment},
            text=True, **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more},
        )  # fmt: skip

    def shape(
        self, rate: str, burst: str = "64kb", both_ways: bool = False, packet_bytes: int = 0
    ) -> None:
        """What leaves a host goes no faster than this, with `both_ways` what comes to it as well.
        The burst has to hold what a fast link sends between two ticks of the kernel, and two
        packets of `packet_bytes`, the largest of a host (0: 64 KiB): the processors cut what does
        not fit into frames of 1500 bytes, and get no further than some 2 Gbit/s."""
        queue = _queue(rate, burst)
        for host, name in enumerate(self.names):
            if packet_bytes:
                ip("-n", name, "link", "set", "eth0", "gso_max_size", str(packet_bytes))
            sending = self.inside(host, "tc", "qdisc", "add", "dev", "eth0", *queue)
            receiving = ["tc", "-n", self.switch, "qdisc", "add", "dev", f"p{host}", *queue]
            for command in (sending, receiving) if both_ways else (sending,):
                subprocess.run(command, check=True, capture_output=True)


@contextlib.contextmanager
def hosts(count: int) -> Iterator[Hosts]:
    end_in_order_on_signals()
    prefix = f"dpcore-{os.getpid()}"
    made = Hosts([f"{prefix}-h{i}" for i in range(count)], f"{prefix}-switch")
    try:
        ip("netns", "add", made.switch)
        ip("-n", made.switch, "link", "add", "br0", "type", "bridge")
        ip("-n", made.switch, "link", "set", "br0", "up")
        for i, name in enumerate(made.names):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", made.switch, "link", "add", f"p{i}", "type", "veth", "peer", "name", "eth0",
               "netns", name)  # fmt: skip
            ip("-n", made.switch, "link", "set", f"p{i}", "master", "br0", "up")
            ip("-n", name, "addr", "add", f"{made.address(i)}/24", "dev", "eth0")
            ip("-n", name, "addr", "add", f"{made.address(i, 6)}/64", "dev", "eth0", "nodad")
            ip("-n", name, "link", "set", "eth0", "up")
            for file, value in TCP.items():
                ip("netns", "exec", name, "sh", "-c", f"echo {value} > {file}")
            for space, device in ((name, "eth0"), (made.switch, f"p{i}")):
                file = _STEERING.format(device)  # not everywhere there, or to be written
                write = f"[ ! -w {file} ] || echo {_processor_of(i)} > {file}"
                ip("netns", "exec", space, "sh", "-c", write)
        yield made
    finally:
        for name in (*made.names, made.switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
