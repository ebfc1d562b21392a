"""How long a connection bears silence: as long as any operation may wait for its peer."""

import contextlib
import os
import socket

import torch

from .over_tcp import over_tcp

USER_TIMEOUT = 18  # milliseconds; the number of TCP_USER_TIMEOUT on Linux


def open_sockets():
    """Of this process: what identifies each, by its descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # others are closed at the same time
            link = os.readlink(f"/proc/self/fd/{name}")
            if link.startswith("socket:"):
                found[int(name)] = link
    return found


def patience_of_connections(earlier):
    """Seconds, of every connection of this process between two ranks, but for those that an earlier
    test has left."""
    found = set()
    for descriptor, link in open_sockets().items():
        if link in earlier:
            continue
        with contextlib.suppress(OSError):
            copy = socket.socket(fileno=os.dup(descriptor))
            with copy:
                if copy.family == socket.AF_INET and copy.getsockopt(
                    socket.SOL_SOCKET, socket.SO_KEEPALIVE
                ):
                    copy.getpeername()  # a listener has none
                    found.add(copy.getsockopt(socket.IPPROTO_TCP, USER_TIMEOUT) / 1000)
    return found


def test_a_connection_bears_silence_as_long_as_the_longest_deadline():
    earlier = set(open_sockets().values())

    def body(comm):
        comm.barrier()  # both ends of every connection are of this process
        seen = [patience_of_connections(earlier)]
        comm.barrier()
        for timeout in (7200.0, 3600.0, float("inf")):
            comm.all_reduce(torch.ones(4), timeout=timeout)
            comm.barrier()
            seen.append(patience_of_connections(earlier))
            comm.barrier()
        comm.close()
        return seen

    for seen in over_tcp(body, timeout=1800.0):
        assert seen == [{1800.0}, {7200.0}, {7200.0}, {2**30 / 1000}]


def test_a_peer_may_allow_itself_more_than_this_rank():
    earlier = set(open_sockets().values())

    def body(comm):
        comm.barrier()
        seen = patience_of_connections(earlier)
        comm.barrier()
        comm.close()
        return seen

    for seen in over_tcp(body, timeout=20.0):
        assert seen == {900.0}
