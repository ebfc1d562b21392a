"""What this machine takes at the least, without dpcore: `python -m benchmarks.floors`

exchange   two processes send each other so many bytes over TCP on the loopback interface, and each
           looks for the other's until they are there: an all-reduce of two ranks does no less
together   so many processes raise a number in shared memory, and each gives its processor away
           until it has seen the others': an operation that all ranks compare before it begins
"""

from __future__ import annotations

import argparse
import mmap
import os
import socket
import statistics
from collections.abc import Callable
from itertools import repeat
from time import perf_counter

ITERATIONS = 3000


def exchange(size: int) -> Callable[[int], Callable[[], None]]:
    listener = socket.create_server(("127.0.0.1", 0))

    def line_of(rank: int) -> Callable[[], None]:
        line = listener.accept()[0] if rank else socket.create_connection(listener.getsockname())
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line.setblocking(False)
        data, room = bytes(size), memoryview(bytearray(size))

        def both_ways() -> None:
            sent = received = 0
            while sent < size or received < size:
                try:
                    sent += line.send(data[sent:]) if sent < size else 0
                    received += line.recv_into(room[received:])
                except BlockingIOError:
                    pass

        return both_ways

    return line_of


def together(world: int) -> Callable[[int], Callable[[], None]]:
    shared = memoryview(mmap.mmap(-1, 64 * world)).cast("Q")

    def member(rank: int) -> Callable[[], None]:
        mine = 8 * rank
        others = [8 * r for r in range(world) if r != rank]

        def step() -> None:
            number = shared[mine] = shared[mine] + 1
            for other in others:
                while shared[other] < number:
                    os.sched_yield()

        return step

    return member


def microseconds(world: int, start: Callable[[int], Callable[[], None]], rounds: int) -> float:
    """The median of rounds, as rank 0 sees it; the other ranks are forked copies."""
    children = []
    for rank in range(1, world):
        child = os.fork()
        if child == 0:
            step = start(rank)
            for _ in repeat(None, rounds * ITERATIONS):
                step()
            os._exit(0)
        children.append(child)
    step, times = start(0), []
    for _ in range(rounds):
        begin = perf_counter()
        for _ in repeat(None, ITERATIONS):
            step()
        times.append((perf_counter() - begin) / ITERATIONS * 1e6)
    for child in children:
        os.waitpid(child, 0)
    return statistics.median(times)


def main() -> None:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--rounds", type=int, default=15, metavar="N")
    rounds = made.parse_args().rounds
    for size in (8, 64, 512, 1024, 4096, 32768):
        print(f"exchange of {size:6d} B  {microseconds(2, exchange(size), rounds):8.2f} us")
    for world in (2, 3, 4):
        print(f"together, {world} ranks   {microseconds(world, together(world), rounds):8.2f} us")


if __name__ == "__main__":
    main()
