"""What lies between ranks: the loopback interface, or a shaped link between hosts of their own.

A host is a network namespace. All share files, processes and this machine's processors, so the
orchestrator commands every rank as before; only what the ranks say to each other goes over the
link, and each has to be told its address and to leave shared memory alone.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dpcore.tools import hosts as namespaces

AGENT = Path(__file__).resolve().parent / "agent.sh"
PORT = 29546  # of dpcore's meeting; nothing else is in these namespaces
# What a link lets through at once. A larger burst has no rate for small messages. A smaller one
# never reaches its rate where the kernel's timers are too late for it: by some 50 us.
LEAST_BURST = 16 << 10
LATE_SECONDS = 50e-6
LARGEST_PACKET = 64 << 10  # of the kernel


class NoWireError(Exception):
    """This machine can't make the link; the message says why."""


@dataclass(frozen=True)
class Wire:
    """``hosts``: one namespace per rank; none where all ranks are at home."""

    name: str = "loopback"
    interface: str = "lo"
    hosts: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()

    def at(self, rank: int, command: list[str]) -> list[str]:
        """What runs a command where a rank lives, and tells it where that is."""
        if not self.hosts:
            return command
        place = [
            f"BENCH_ADDRESS={self.addresses[rank]}",
            f"BENCH_MEETING=tcp://{self.addresses[0]}:{PORT}",
        ]
        return ["ip", "netns", "exec", self.hosts[rank], "env", *place, *command]

    def before_mpiexec(self, library: str, command: list[str]) -> list[str]:
        """What starts an mpiexec with these options, itself on the first host."""
        known = zip(self.addresses, self.hosts, strict=True)
        settings = ["BENCH_HOSTS=" + " ".join(f"{address}={host}" for address, host in known)]
        if library == "mpich":
            settings += ["MPIR_CVAR_NOLOCAL=1", "UCX_TLS=tcp,self"]
            # UCX finds a way to this host by itself, but none that is called lo.
            settings += [f"UCX_NET_DEVICES={self.interface}"] if self.hosts else []
        if self.hosts:  # the agent, since MPI tells hosts by their names
            command = [str(AGENT), self.addresses[0], shlex.join(command)]
        return ["env", *settings, *command]

    def openmpi(self) -> list[str]:
        """Options of Open MPI's mpiexec: TCP and nothing else."""
        options = ["--mca", "pml", "ob1", "--mca", "btl", "self,tcp"]
        options += ["--mca", "btl_tcp_if_include", self.interface]
        if self.hosts:
            options += ["--host", ",".join(f"{address}:1" for address in self.addresses)]
            options += ["--map-by", "node", "--prtemca", "prte_if_include", self.interface]
            options += ["--prtemca", "plm_ssh_agent", str(AGENT)]
            options += ["--prtemca", "plm_ssh_no_tree_spawn", "1"]
        return options

    def mpich(self) -> list[str]:
        """Options of MPICH's mpiexec. Variables keep its ranks from shared memory."""
        if not self.hosts:
            return []
        options = ["-launcher", "ssh", "-launcher-exec", str(AGENT), "-iface", self.interface]
        return [*options, "-hosts", ",".join(self.addresses)]


LOOPBACK = Wire()


@contextmanager
def wire(name: str, world: int) -> Iterator[Wire]:
    """ "loopback", or "1gbit": as many hosts as ranks, each of which sends no faster than that."""
    if name == "loopback":
        yield LOOPBACK
        return
    if reason := namespaces.why_not():
        raise NoWireError(f"a shaped link {reason}")
    with namespaces.hosts(world) as made:
        try:
            _shape(made, name)
        except subprocess.CalledProcessError as problem:
            said = problem.stderr.decode(errors="replace").strip()
            raise NoWireError(f"a link of {name!r} can't be made: {said}") from None
        addresses = tuple(made.address(host) for host in range(world))
        yield Wire(name, "eth0", tuple(made.names), addresses)


def _shape(made: namespaces.Hosts, rate: str) -> None:
    """A NIC cuts large packets by itself. Here processors do, where a packet is larger than the
    burst; a fast link has no time for that, so its packets are small enough."""
    burst = namespaces.burst_for(rate, LATE_SECONDS, LEAST_BURST)
    is_fast = LEAST_BURST < burst < 2 * LARGEST_PACKET
    made.shape(rate, f"{burst}b", packet_bytes=burst // 2 if is_fast else 0)
