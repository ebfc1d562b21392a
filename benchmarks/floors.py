"""What this machine takes at the least, without dpcore: `python -m benchmarks.floors`

exchange   two processes send each other so many bytes over TCP on the loopback interface, and each
           looks for the other's until they are there: an all-reduce of two ranks does no less
together   so many processes raise a number in shared memory, and each gives its processor away
           until it has seen the others': an operation that all ranks compare before it begins
after the root   the same, but they look only at the first one's: a broadcast or a scatter
to the partner   the same, in pairs, there and back: a message
reading    two processes read half a MiB of each other's memory and copy half a MiB of their own:
           an all_gather of ordinary memory
message    one process copies 32 KiB, or 1 MiB, into cells of shared memory, another one out of
           them: also a broadcast of ordinary memory
number     the same two do what "together" does, in turns with the messages of 1 MiB; shown for the
           fastest and the slowest tenth of the messages. Where it is slow with them, for seconds,
           the way between the two processors has become longer
all_reduce   of two ranks, of tensors of the arena and of others: without dpcore, and dpcore's, in
           turns, and how far the two processors are apart meanwhile
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import statistics
from collections.abc import Callable, Sequence
from itertools import repeat
from pathlib import Path
from time import perf_counter

from benchmarks.harness import host_floor
from benchmarks.harness.options import script_parser
from dpcore.base.processes import end_with_parent
from dpcore.tools.records import keep, run_facts

ALL_REDUCE_KIB = (64, 256, 1024, 4096, 16384)

Start = Callable[[int], Callable[[], None]]  # of a rank: what it does again and again
Watched = Callable[[int, int], dict[int, int]]  # of a rank and a world: see numbers()


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


def numbers(world: int, watched: Watched) -> Start:
    """A rank's step: to wait until those whom it watches are far enough, and to raise its own
    number. It looks again and again, and gives its processor away in between."""
    shared = memoryview(mmap.mmap(-1, 64 * world)).cast("Q")

    def member(rank: int) -> Callable[[], None]:
        mine = 8 * rank
        others = [(8 * other, behind) for other, behind in watched(rank, world).items()]

        def step() -> None:
            number = shared[mine] + 1
            for other, behind in others:
                while shared[other] < number - behind:
                    os.sched_yield()
            shared[mine] = number

        return step

    return member


def all_others(rank: int, world: int) -> dict[int, int]:
    return {other: 1 for other in range(world) if other != rank}


def partner(rank: int, world: int) -> dict[int, int]:
    """There and back: the odd ones answer."""
    return {rank ^ 1: 1 - rank % 2}


def root(rank: int, world: int) -> dict[int, int]:
    """Everybody waits for rank 0, which is at most 64 steps ahead."""
    return {0: 0} if rank else dict.fromkeys(range(1, world), 64)


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


def reading(size: int) -> Start:
    """Each has half of so many bytes, and ends with a copy of all: the kernel copies the other's
    half out of its memory, which nothing writes to."""
    half = size // 2
    shared = memoryview(mmap.mmap(-1, 4096)).cast("Q")  # by rank: its number, process, address
    vector = ctypes.c_size_t * 2  # an address and a length
    read = ctypes.CDLL(None).process_vm_readv

    def member(rank: int) -> Callable[[], None]:
        own, whole = bytearray(half), bytearray(size)
        given = ctypes.addressof(ctypes.c_char.from_buffer(own))
        taken = ctypes.addressof(ctypes.c_char.from_buffer(whole)) + (1 - rank) * half
        mine, other = 64 * rank, 64 * (1 - rank)
        shared[mine + 1], shared[mine + 2] = os.getpid(), given
        begin = rank * half
        here = vector(taken, half)

        def step() -> None:
            number = shared[mine] = shared[mine] + 1
            while shared[other] < number:
                pass
            there = vector(shared[other + 2], half)
            assert read(shared[other + 1], here, 1, there, 1, 0) == half
            whole[begin : begin + half] = own

        return step

    return member


def microseconds(
    world: int, starts: Sequence[Start], rounds: int, iterations: int
) -> list[list[float]]:
    """Of each start the times of its rounds, as rank 0 sees them; the other ranks are forked."""
    children, parent = [], os.getpid()
    over, still_running = os.pipe()
    for rank in range(1, world):
        child = os.fork()
        if child == 0:
            # It waits for rank 0 in a loop, and would do so for ever when that is killed.
            end_with_parent(parent)
            steps = [start(rank) for start in starts]
            for step in steps * rounds:
                for _ in repeat(None, iterations):
                    step()
            os.close(still_running)
            os.read(over, 1)  # rank 0 may still read this process's memory
            os._exit(0)
        children.append(child)
    steps, times = [start(0) for start in starts], []
    for step in steps * rounds:
        begin = perf_counter()
        for _ in repeat(None, iterations):
            step()
        times.append((perf_counter() - begin) / iterations * 1e6)
    os.close(still_running)
    for child in children:
        os.waitpid(child, 0)
    os.close(over)
    return [times[first :: len(starts)] for first in range(len(starts))]


def tenths(times: Sequence[float]) -> dict[str, float]:
    """Of times in the order of their messages: the fastest tenth, all, and the slowest tenth."""
    tenth = len(times) // 10
    parts = {"fast": times[:tenth], "median": times, "slow": times[-tenth:]}
    return {name: statistics.median(part) for name, part in parts.items()}


def main() -> None:
    made = script_parser(__doc__)
    made.add_argument("--rounds", type=int, default=15, help="default: %(default)s")
    made.add_argument("--records", type=Path, metavar="FILE", help="append the results there")
    options = made.parse_args()
    rounds, lines = options.rounds, []
    for size in (8, 64, 512, 1024, 4096, 32768):
        (times,) = microseconds(2, [exchange(size)], rounds, 3000)
        lines.append({"what": f"exchange of {size} B", "median": statistics.median(times)})
    for what, watched, world, divisor in (
        ("together, 2 ranks", all_others, 2, 1),
        ("together, 3 ranks", all_others, 3, 1),
        ("together, 4 ranks", all_others, 4, 1),
        ("after the root, 4 ranks", root, 4, 1),
        ("to the partner, 2 ranks", partner, 2, 2),
        ("to the partner, 4 ranks", partner, 4, 2),
    ):
        (times,) = microseconds(world, [numbers(world, watched)], rounds, 3000)
        lines.append({"what": what, "median": statistics.median(times) / divisor})
    for what, start in (
        ("message of 32 KiB", messages(32 << 10)),
        ("reading, 1 MiB", reading(1 << 20)),
    ):
        (times,) = microseconds(2, [start], rounds, 300)
        lines.append({"what": what, "median": statistics.median(times)})
    both = microseconds(2, [messages(1 << 20), numbers(2, all_others)], 100 * rounds, 20)
    by_message = zip(*sorted(zip(*both, strict=True)), strict=True)
    for what, times in zip(("message of 1 MiB", "number"), by_message, strict=True):
        lines.append({"what": what, **tenths(times)})
    print(f"{'us':24}{'median':>10}{'fastest tenth':>16}{'slowest tenth':>16}")
    for line in lines:
        extremes = "".join(f"{line[name]:16.2f}" for name in ("fast", "slow") if name in line)
        print(f"{line['what']:24}{line['median']:10.2f}{extremes}")
    print(f"{'us':24}{'floor':>10}{'dpcore':>10}{'of floor':>10}{'apart':>10}")
    reduced = host_floor.run([size << 10 for size in ALL_REDUCE_KIB], rounds)
    for found in reduced:
        columns = "".join(f"{found[one]:10.2f}" for one in ("floor", "dpcore", "of_floor", "apart"))
        print(f"{host_floor.name_of(found):24}{columns}")
    keep(options.records, run_facts({}, {"rounds": rounds}), lines + reduced)


if __name__ == "__main__":
    main()
