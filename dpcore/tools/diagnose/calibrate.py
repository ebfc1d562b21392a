"""``dpcore calibrate``: what this machine and its network cost, measured once in half a minute.

The choice of algorithms needs the time of a step, a message and a byte: two ranks exchange
messages, small ones back and forth, many small ones at once, and large ones. ``dpcore simulate``
also needs what operations take of processors: the floor of an operation where nothing has to be
waited for, a message within it, how long a thread takes to wake up, on idle cores and where all of
them compute, and what that takes of a core then, a byte that is copied, added, or given to the
kernel, while both ranks do so, and a call of an optimizer. Nothing is measured in training steps,
which are to be predicted.

By itself the command measures memory and loopback with two ranks of its own; behind a launcher that
started ranks on several hosts, the network between them, for the machine of each host.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpcore.comm.communicators import costs
from dpcore.comm.launch.identity import is_launched
from dpcore.errors import Unsupported

if TYPE_CHECKING:
    from dpcore.comm.communicators.native import Communicator

_SMALL = 64
_BURST = 32
_LARGE = 8 << 20
_TIMEOUT_SECONDS = 60.0
_NEAR, _FAR = 1e-6, 1e-3  # latencies of emulated links: less than a thread's sleep, and more
_SEGMENT = 64 << 10  # of a message in memory that ranks share
_TRIES = 4  # of a difference that other programs may hide
_CHUNKS = 16  # as many messages as fit a mailbox
_SET_TIMER_SLACK = 29  # PR_SET_TIMERSLACK; 0 is the default
_NAP_SECONDS = 1e-3  # about what a driving thread waits for a message
_UPDATES = 8  # parameters of 64 KiB, which stay in a cache
_DRIVEN = 16  # operations of 1 MiB at a time
_DRIVEN_OVER = "4gbit,50us"  # where a message takes longer than a thread is awake
_PAUSE_SECONDS = 0.3  # longer than Linux keeps the window of a silent connection on a short link


def run(options: argparse.Namespace) -> int:
    """Measures, writes the file and says what it holds; the exit status."""
    measured = _between_hosts(options.seconds) if is_launched() else _alone(options.seconds)
    if measured:
        _show(costs.save(measured, options.file), measured, options.json)
    return 0


def _alone(seconds: float) -> dict[str, Any]:
    from dpcore.comm.launch.spawn import spawn

    def on_two(body: Callable[[Communicator], Any], **options: Any) -> Any:
        return spawn(body, 2, timeout=_TIMEOUT_SECONDS, **options)[0]

    def way(comm: Communicator) -> list[float]:
        return measure(comm, 0, 1, seconds)

    def floors(comm: Communicator) -> tuple[float, float, float]:
        few, message = _floors(lambda chunks: _all_reduce(comm, chunks, seconds), _alike(comm))
        return few, message, _tcp_byte(comm, seconds) if comm.transport == "tcp" else 0.0

    in_memory = on_two(lambda comm: _in_memory(comm, seconds), transport="shm")
    near, message, _ = on_two(floors, transport="shm", link=_link_of(_NEAR))
    far, _, _ = on_two(floors, transport="shm", link=_link_of(_FAR))
    _, tcp_message, tcp_byte = on_two(floors, transport="tcp")
    _tell_of_zeros({"message": message, "tcp_message": tcp_message})
    # On an emulated link nothing but its latency is waited for, twice, and two messages handled. On
    # a long one the thread sleeps until the last entry is seen, and until the messages arrive.
    operation = max(0.0, near - 2 * _NEAR - 2 * message)
    wake = max(0.0, far - 2 * _FAR - operation - 2 * message) / 2
    return {
        "memory": on_two(way, transport="shm"),
        "loopback": on_two(way, transport="tcp"),
        "added_byte": _added_byte(seconds),
        "operation": operation,
        "message": message,
        "tcp_message": tcp_message,
        "wake": wake,
        "busy_wake": _busy_wake(seconds),
        "woken": _woken(on_two, seconds, message, in_memory),
        "tcp_byte": tcp_byte,
        "update_call": on_two(lambda comm: _update_call(comm, seconds), transport="shm"),
        **in_memory,
    }


def _floors(
    floor: Callable[[int], float], alike: Callable[[float], float] = float
) -> tuple[float, float]:
    """Seconds of an operation of one chunk, and of a message, by what an operation of many chunks
    takes longer. Measured again where other programs hide that; 0 if they do so each time.
    ``alike``: makes both ranks decide by the same number."""
    for _ in range(_TRIES):
        few, many = floor(1), floor(_CHUNKS)
        if (more := alike(many - few)) > 0:
            break
    return few, max(0.0, more) / 2 / (_CHUNKS - 1)  # one that is sent and one that is taken


def _alike(comm: Communicator) -> Callable[[float], float]:
    import numpy as np

    def of_rank_0(value: float) -> float:
        values = np.array([value])
        comm.broadcast(values, 0)
        return float(values[0])

    return of_rank_0


def _tell_of_zeros(found: dict[str, float]) -> None:
    for name, seconds in found.items():
        if not seconds:
            print(
                f"dpcore calibrate: the machine is too busy to measure {name}, which is 0 in the "
                "file; close other programs and calibrate again",
                file=sys.stderr,
            )


def _link_of(latency: float) -> str:
    return f"{latency * 1e6:g}us"


def measure(comm: Communicator, one: int, other: int, seconds: float) -> list[float]:
    """Seconds of a step, a message and a byte between two ranks; all others wait."""
    import numpy as np

    messages = np.zeros((_BURST, _SMALL), dtype=np.uint8)
    small = messages[0]
    large = np.zeros(_LARGE, dtype=np.uint8)
    peer = {one: other, other: one}.get(comm.rank)

    def back_and_forth(buffer: Any) -> None:
        assert peer is not None
        first, second = (comm.send, comm.recv) if comm.rank == one else (comm.recv, comm.send)
        first(buffer, peer)
        second(buffer, peer)

    def burst() -> None:
        assert peer is not None
        way = comm.send if comm.rank == one else comm.recv
        works = [way(messages[i], peer, tag=i, async_op=True) for i in range(_BURST)]
        for work in works:
            assert work is not None
            work.wait()
        back_and_forth(small)

    times = np.zeros(3)
    if peer is not None:
        step = _best(lambda: back_and_forth(small), comm, peer, seconds) / 2
        burst_time = _best(burst, comm, peer, seconds)
        byte = (_best(lambda: back_and_forth(large), comm, peer, seconds) / 2 - step) / _LARGE
        # A message costs its sender and its receiver time; they work at once.
        message = max(0.0, burst_time - 2 * step) / _BURST
        times[:] = [step, message, max(byte, 0.0)]
    comm.broadcast(times, one)
    return [float(x) for x in times]


def _best(call: Callable[[], None], comm: Communicator, peer: int, seconds: float) -> float:
    """The time of a call that both ranks make equally often: the largest of the fastest quarter."""
    import numpy as np

    begin = time.perf_counter()
    call()
    rounds = np.array([max(5, min(2000, int(seconds / (time.perf_counter() - begin))))])
    if comm.rank < peer:
        comm.send(rounds, peer)
    else:
        comm.recv(rounds, peer)
    taken: list[float] = []
    for _ in range(int(rounds[0])):
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin)
    return sorted(taken)[len(taken) // 4]


def _added_byte(seconds: float) -> float:
    """The time of one more operand in a sum, beyond the copy: two inputs and one output in the
    cache."""
    import numpy as np

    from dpcore import _C

    one, other = np.zeros(1 << 16, dtype=np.float32), np.zeros(1 << 16, dtype=np.float32)
    inputs, outputs = [one.ctypes.data, other.ctypes.data], [one.ctypes.data]
    taken: list[float] = []
    ends_at = time.perf_counter() + seconds
    while time.perf_counter() < ends_at or len(taken) < 5:
        begin = time.perf_counter()
        _C._reduce("float32", "sum", inputs, outputs, one.size)
        taken.append(time.perf_counter() - begin)
    return sorted(taken)[len(taken) // 4] / one.nbytes


def _all_reduce(comm: Communicator, chunks: int, seconds: float) -> float:
    """Seconds of an operation of a few bytes that the program waits for, with a message each way
    for each of so many chunks."""
    import numpy as np

    from dpcore import _C

    tensor = np.zeros(64 * chunks, dtype=np.float32)
    moves = [(0, rank, 1 - rank, chunk, True) for chunk in range(chunks) for rank in range(2)]
    schedule = _C.Schedule("both", "all_reduce", 2, chunks, moves)

    def call() -> None:
        comm.all_reduce(tensor, algorithm=schedule)

    return _best(call, comm, 1 - comm.rank, seconds)


def _in_memory(comm: Communicator, seconds: float) -> dict[str, float]:
    """Seconds to copy a byte and to add one, outside the caches, on both ranks at once; of an
    all-reduce in shared memory, and of each byte that it adds and writes."""
    import numpy as np

    from dpcore import _C

    one, other = (np.zeros(_LARGE // 4, dtype=np.float32) for _ in range(2))
    inputs, outputs = [one.ctypes.data, other.ctypes.data], [one.ctypes.data]

    def copy() -> None:
        np.copyto(one, other)

    def add() -> None:
        _C._reduce("float32", "sum", inputs, outputs, one.size)

    found = {}
    for name, call in (("copied_byte", copy), ("reduced_byte", add)):
        call()
        comm.barrier()
        taken: list[float] = []
        ends_at = time.perf_counter() + seconds
        while time.perf_counter() < ends_at or len(taken) < 5:
            begin = time.thread_time()
            call()
            taken.append(time.thread_time() - begin)
        found[name] = sorted(taken)[len(taken) // 4] / one.nbytes
    # Of two ranks, each adds half of the bytes, and writes them to both.
    few, many = (
        _best(partial(_run, comm, comm.empty(n)), comm, 1 - comm.rank, seconds)
        for n in (16, _LARGE // 4)
    )
    return {**found, "memory_operation": few, "fused_byte": max(0.0, many - few) / (_LARGE / 2)}


def _busy_wake(seconds: float) -> float:
    """Seconds until a thread that slept as the core's do runs, in the mean, while another process
    computes on each core."""
    late: list[float] = []
    with _busy(os.cpu_count() or 1), _precise_sleep():
        ends_at = time.perf_counter() + max(1.0, seconds)
        while time.perf_counter() < ends_at:
            begin = time.perf_counter()
            time.sleep(_NAP_SECONDS)
            late.append(time.perf_counter() - begin - _NAP_SECONDS)
    return sum(late) / len(late)


@contextlib.contextmanager
def _precise_sleep() -> Iterator[None]:
    """By default Linux may add 50 us to every sleep of a thread."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_SET_TIMER_SLACK, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_SET_TIMER_SLACK, 0, 0, 0, 0)


def _woken(
    on_two: Callable[..., Any], seconds: float, message: float, costs: dict[str, float]
) -> float:
    """Seconds of a core, each time that a thread which drives operations goes to sleep and wakes up
    again, beyond its messages and bytes, while something computes on each. It sleeps between a
    message and the next one."""
    with _busy((os.cpu_count() or 1) - 2):
        took = on_two(lambda comm: _driven(comm, seconds), transport="shm", link=_DRIVEN_OVER)
    # Of two ranks, each sends and takes all bytes, adds one half and puts the other in place.
    nbytes = _DRIVEN << 20
    messages = nbytes / _SEGMENT
    per_byte = costs["copied_byte"] * 1.5 + costs["reduced_byte"] * 0.5
    return float(max(0.0, took - 2 * messages * message - nbytes * per_byte) / messages)


def _driven(comm: Communicator, seconds: float) -> float:
    """What operations beside a program that computes take from it, in the middle of some rounds: by
    how much the slower program is behind, since ranks wait for each other. Linux may let both
    driving threads interrupt the same one. Where they run on cores of others: what they take."""
    import numpy as np

    one, other = (np.zeros(1 << 11, dtype=np.float32) for _ in range(2))
    tensors = [comm.empty(1 << 18) for _ in range(_DRIVEN)]

    def computed(goes_on: Callable[[], bool]) -> tuple[int, float]:
        calls, begin = 0, time.perf_counter()
        while goes_on():
            np.multiply(one, other, out=one)
            calls += 1
        return calls, time.perf_counter() - begin

    def elsewhere() -> float:
        whole, own = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_THREAD))
        return whole.ru_utime + whole.ru_stime - own.ru_utime - own.ru_stime

    def driven() -> float:
        comm.barrier()
        before = elsewhere()
        works = [comm.all_reduce(tensor, async_op=True) for tensor in tensors]
        calls, beside = computed(lambda: not works[-1].is_completed())
        for work in works:
            work.wait()
        took = elsewhere() - before
        comm.barrier()
        left = iter(range(calls))
        _, alone = computed(lambda: next(left, None) is not None and works[-1].is_completed())
        most = np.array([max(took, beside - alone)])
        comm.all_reduce(most, op="max")
        return float(most[0])

    found: list[float] = []
    ends_at = time.perf_counter() + max(1.0, 2 * seconds)
    goes_on = np.ones(1)
    while goes_on[0]:
        found.append(driven())
        goes_on[0] = time.perf_counter() < ends_at
        comm.broadcast(goes_on, 0)
    rounds = found[1:] or found  # the first one warms up
    return sorted(rounds)[len(rounds) // 2]


@contextlib.contextmanager
def _busy(cores: int) -> Iterator[None]:
    """Another process computes on each of so many."""
    import multiprocessing

    context = multiprocessing.get_context("forkserver")
    over, begun = context.Event(), context.Barrier(max(0, cores) + 1)
    busy = [context.Process(target=_compute, args=(begun, over), daemon=True) for _ in range(cores)]
    for process in busy:
        process.start()
    try:
        begun.wait(_TIMEOUT_SECONDS)
        yield
    finally:
        over.set()
        for process in busy:
            process.join()


def _compute(begun: Any, over: Any) -> None:
    begun.wait(_TIMEOUT_SECONDS)
    while not over.is_set():
        sum(range(100_000))


def _update_call(comm: Communicator, seconds: float) -> float:
    """Seconds of a thread: what AdamW takes longer for one parameter at a time than for all of
    them, by further call. Without torch there is nothing to measure."""
    try:
        import torch
    except ImportError:
        return 0.0
    torch.set_num_threads(1)
    parameters = [torch.nn.Parameter(torch.zeros(1 << 14)) for _ in range(_UPDATES)]
    gradients = [torch.ones(1 << 14) for _ in parameters]
    optimizer = torch.optim.AdamW(parameters)

    def step(chosen: range) -> float:
        for number, parameter in enumerate(parameters):
            parameter.grad = gradients[number] if number in chosen else None
        begin = time.thread_time()
        optimizer.step()
        return time.thread_time() - begin

    step(range(_UPDATES))
    longer: list[float] = []
    comm.barrier()
    ends_at = time.perf_counter() + seconds
    while time.perf_counter() < ends_at or len(longer) < 5:  # as often as there is time for
        together = step(range(_UPDATES))
        by_itself = sum(step(range(n, n + 1)) for n in range(_UPDATES))
        longer.append((by_itself - together) / (_UPDATES - 1))
    comm.barrier()
    return max(0.0, sorted(longer)[len(longer) // 2])


def _run(comm: Communicator, tensor: Any) -> None:
    comm.all_reduce(tensor)


def _tcp_byte(comm: Communicator, seconds: float) -> float:
    """Seconds that the kernel takes for a byte, of the sender and of the receiver on average."""
    import numpy as np

    large = np.zeros(_LARGE, dtype=np.uint8)
    way = comm.send if comm.rank == 0 else comm.recv
    way(large, 1 - comm.rank)
    rounds = max(3, round(seconds * 2e9 / _LARGE))
    begin = resource.getrusage(resource.RUSAGE_SELF).ru_stime
    for _ in range(rounds):
        way(large, 1 - comm.rank)
    took = np.array([resource.getrusage(resource.RUSAGE_SELF).ru_stime - begin])
    comm.all_reduce(took)
    return float(took[0]) / 2 / rounds / _LARGE


def _after_pause(comm: Communicator, one: int, other: int) -> float:
    """Seconds that a message of a MiB takes longer after a pause than behind another one: TCP then
    begins with a small window."""
    import numpy as np

    message = np.zeros(1 << 20, dtype=np.uint8)
    longer = np.zeros(1)
    if comm.rank in (one, other):
        peer = other if comm.rank == one else one
        first, second = (comm.send, comm.recv) if comm.rank == one else (comm.recv, comm.send)

        def back_and_forth(pause: float) -> float:
            time.sleep(pause)
            begin = time.perf_counter()
            first(message, peer)
            second(message, peer)
            return time.perf_counter() - begin

        back_and_forth(0.0)
        busy = min(back_and_forth(0.0) for _ in range(5))
        rested = min(back_and_forth(_PAUSE_SECONDS) for _ in range(3))
        longer[0] = max(0.0, rested - busy) / 2
    comm.broadcast(longer, one)
    return float(longer[0])


def _between_hosts(seconds: float) -> dict[str, Any]:
    """On the lowest rank of each host what it may write; on all others nothing."""
    from dpcore.comm.launch.session import finalize, init

    comm = init(timeout=_TIMEOUT_SECONDS)
    hosts = comm.hosts
    others = [rank for rank in range(comm.world_size) if hosts[rank] != hosts[0]]
    if not others:
        finalize()
        raise Unsupported(
            "the launcher started all ranks on one host; without a launcher this command "
            "measures this machine"
        )
    network = measure(comm, 0, others[0], seconds)
    longer = _after_pause(comm, 0, others[0])
    is_first = comm.rank == hosts.index(hosts[comm.rank])
    finalize()
    return {"network": network, "after_pause": longer} if is_first else {}


def _show(where: Path, measured: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"file": str(where), **measured}))
        return
    for name, value in measured.items():
        if isinstance(value, list):
            step, message, byte = value
            rate = 1e-9 / byte if byte > 0 else float("inf")
            print(f"{name:<16} {step * 1e6:8.1f} us a step {message * 1e6:8.1f} us a message "
                  f"{rate:8.2f} GB/s")  # fmt: skip
        elif name.endswith("_byte"):
            print(f"{name:<16} {1e-9 / value if value > 0 else float('inf'):8.2f} GB/s")
        else:
            print(f"{name:<16} {value * 1e6:8.1f} us")
    print(f"written to {where}")
