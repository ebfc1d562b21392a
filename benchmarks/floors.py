"""What this machine takes at the least, without dpcore: `python -m benchmarks.floors`

exchange   two processes send each other so many bytes over TCP on the loopback interface, and each
           looks for the other's until they are there: an all-reduce of two ranks does no less
together   so many processes raise a number in shared memory, and each gives its processor away
           until it has seen the others': an operation that all ranks compare before it begins
message    one process copies 1 MiB into cells of shared memory, another one out of them
number     the same two do what "together" does, in turns with the messages; shown for the fastest
           and the slowest tenth of the messages. Where it is slow with them, for seconds, the way
           between the two processors has become longer
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import socket
import statistics
from collections.abc import Callable, Sequence
from itertools import repeat
from pathlib import Path
from time import perf_counter

from benchmarks.harness.options import script_parser
from dpcore.compare.records import keep, run_facts

_PR_SET_PDEATHSIG = 1
Start = Callable[[int], Callable[[], None]]  # of a rank: what it does again and again


def exchange(size: int) -> Start:
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


def together(world: int) -> Start:
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


def messages(size: int) -> Start:
    """From rank 0 to rank 1, through 16 cells of 16 KiB."""
    cell, cells = 16384, 16
    numbers = memoryview(mmap.mmap(-1, 4096)).cast("Q")
    box = memoryview(mmap.mmap(-1, cell * cells))
    written, taken = 0, 16  # each in a line of its own

    def member(rank: int) -> Callable[[], None]:
        data = memoryview(bytearray(size))

        def send() -> None:
            for begin in range(0, size, cell):
                number = numbers[written]
                while number - numbers[taken] == cells:
                    pass
                at = number % cells * cell
                box[at : at + cell] = data[begin : begin + cell]
                numbers[written] = number + 1

        def receive() -> None:
            for begin in range(0, size, cell):
                number = numbers[taken]
                while numbers[written] == number:
                    pass
                at = number % cells * cell
                data[begin : begin + cell] = box[at : at + cell]
                numbers[taken] = number + 1

        return receive if rank else send

    return member


def microseconds(
    world: int, starts: Sequence[Start], rounds: int, iterations: int
) -> list[list[float]]:
    """Of each start the times of its rounds, as rank 0 sees them; the other ranks are forked."""
    children = []
    for rank in range(1, world):
        child = os.fork()
        if child == 0:
            # It waits for rank 0 in a loop, and would do so for ever when that is killed.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            steps = [start(rank) for start in starts]
            for step in steps * rounds:
                for _ in repeat(None, iterations):
                    step()
            os._exit(0)
        children.append(child)
    steps, times = [start(0) for start in starts], []
    for step in steps * rounds:
        begin = perf_counter()
        for _ in repeat(None, iterations):
            step()
        times.append((perf_counter() - begin) / iterations * 1e6)
    for child in children:
        os.waitpid(child, 0)
    return [times[first :: len(starts)] for first in range(len(starts))]


def tenths(times: Sequence[float]) -> dict[str, float]:
    """Of times in the order of their messages: the fastest tenth, all, and the slowest tenth."""
    tenth = len(times) // 10
    parts = {"fast": times[:tenth], "median": times, "slow": times[-tenth:]}
    return {name: statistics.median(part) for name, part in parts.items()}


def main() -> None:
    made = script_parser(__doc__)
    made.add_argument("--rounds", type=int, default=15, help="default: %(default)s")
    made.add_argument("--json", type=Path, metavar="FILE", help="append the results there")
    options = made.parse_args()
    rounds, lines = options.rounds, []
    for size in (8, 64, 512, 1024, 4096, 32768):
        (times,) = microseconds(2, [exchange(size)], rounds, 3000)
        lines.append({"what": f"exchange of {size} B", "median": statistics.median(times)})
    for world in (2, 3, 4):
        (times,) = microseconds(world, [together(world)], rounds, 3000)
        lines.append({"what": f"together, {world} ranks", "median": statistics.median(times)})
    both = microseconds(2, [messages(1 << 20), together(2)], 100 * rounds, 20)
    by_message = zip(*sorted(zip(*both, strict=True)), strict=True)
    for what, times in zip(("message of 1 MiB", "number"), by_message, strict=True):
        lines.append({"what": what, **tenths(times)})
    print(f"{'us':24}{'median':>10}{'fastest tenth':>16}{'slowest tenth':>16}")
    for line in lines:
        extremes = "".join(f"{line[name]:16.2f}" for name in ("fast", "slow") if name in line)
        print(f"{line['what']:24}{line['median']:10.2f}{extremes}")
    keep(options.json, run_facts({}, {"rounds": rounds}), lines)


if __name__ == "__main__":
    main()
