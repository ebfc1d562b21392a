"""``dpcore bench --calibrate``: measures what the cost model needs, once per machine and link.

Two ranks exchange messages: small ones back and forth for the time of a step, many small ones for
the time of a message, large ones for the time of a byte. By itself the command measures memory and
loopback with two ranks of its own; behind a launcher that started ranks on several hosts, the
network between them, for the machine of each host.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
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


def run(as_json: bool, seconds: float) -> int:
    """Measures, writes the file and says what it holds; the exit status."""
    if is_launched():
        measured = _between_hosts(seconds)
    else:
        from dpcore.comm.launch.spawn import spawn

        def body(comm: Communicator) -> list[float]:
            return measure(comm, 0, 1, seconds)

        measured = {
            "memory": spawn(body, 2, transport="shm", timeout=_TIMEOUT_SECONDS)[0],
            "loopback": spawn(body, 2, transport="tcp", timeout=_TIMEOUT_SECONDS)[0],
            "added_byte": _added_byte(seconds),
        }
    if measured:
        _show(costs.save(measured), measured, as_json)
    return 0


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


def _between_hosts(seconds: float) -> dict[str, Any]:
    """On the lowest rank of each host what it may write; on all others nothing."""
    from dpcore.comm.launch.session import finalize, init

    comm = init(timeout=_TIMEOUT_SECONDS)
    hosts = comm.hosts
    others = [rank for rank in range(comm.world_size) if hosts[rank] != hosts[0]]
    if not others:
        finalize()
        raise Unsupported(
            "--calibrate: the launcher started all ranks on one host; without a launcher it "
            "measures this machine"
        )
    network = measure(comm, 0, others[0], seconds)
    is_first = comm.rank == hosts.index(hosts[comm.rank])
    finalize()
    return {"network": network} if is_first else {}


def _show(where: Path, measured: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"file": str(where), **measured}))
        return
    for name, value in measured.items():
        if isinstance(value, list):
            step, message, byte = value
            rate = 1e-9 / byte if byte > 0 else float("inf")
            print(f"{name:<10} {step * 1e6:8.1f} us a step {message * 1e6:8.1f} us a message "
                  f"{rate:8.2f} GB/s")  # fmt: skip
        else:
            print(f"{name:<10} {1e-9 / value:8.2f} GB/s")
    print(f"written to {where}")
