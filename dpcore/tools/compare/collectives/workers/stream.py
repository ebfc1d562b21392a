"""One raw TCP stream to the right neighbour and one from the left: what the kernel allows.

An all-reduce of S moves at least 2 (N-1)/N S out of every rank and as much in, so that is what
flows here, both ways at once. Nothing is added. By itself it flows from and to one piece of memory,
which stays in the cache; as ``in_place``, from and to memory of size S, as an all-reduce has it.
"""

from __future__ import annotations

import os
import select
import socket
import time
from pathlib import Path
from time import monotonic, perf_counter, sleep

from dpcore.base.files import write_whole
from dpcore.tools.compare.collectives.cells import Cell
from dpcore.tools.compare.collectives.workers.backend import (
    Backend,
    Place,
    Prepared,
    UnsupportedError,
)

PIECE = 256 << 10
IN_PLACE = "in_place"
PATIENCE_SECONDS = 30.0


class StreamBackend(Backend):
    def __init__(self, place: Place) -> None:
        self.rank, self.world = place.rank, place.world
        here = os.environ.get("BENCH_ADDRESS", "127.0.0.1")
        with socket.create_server((here, 0)) as listener:
            write_whole(_meeting(place, place.rank), f"{here} {listener.getsockname()[1]}")
            host, port = _published(_meeting(place, (place.rank + 1) % place.world)).split()
            self._out = socket.create_connection((host, int(port)))
            self._in, _ = listener.accept()
        for line in (self._out, self._in):
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            line.setblocking(False)

    def versions(self) -> dict[str, str]:
        return {}

    def synchronise(self, start_at: float) -> None:
        sleep(max(0.0, start_at - monotonic()))

    def close(self) -> None:
        self._out.close()
        self._in.close()

    def prepare(self, variant: str, cell: Cell) -> Prepared:
        if cell.collective != "all_reduce":
            raise UnsupportedError("only the bytes of an all-reduce are known here")
        size = max(1, 2 * (self.world - 1) * cell.bytes // self.world)
        memory = memoryview(bytearray(max(PIECE, cell.bytes if variant == IN_PLACE else 0)))

        def seconds_per_iteration(iterations: int) -> float:
            begin = perf_counter()
            for _ in range(iterations):
                self._exchange(size, memory)
            return (perf_counter() - begin) / iterations

        return Prepared(seconds_per_iteration)

    def _exchange(self, size: int, memory: memoryview) -> None:
        to_send, to_receive = size, size
        while to_send or to_receive:
            sent = self._send(_piece(memory, size, to_send)) if to_send else 0
            received = self._receive(_piece(memory, size, to_receive)) if to_receive else 0
            to_send -= sent
            to_receive -= received
            if not sent and not received:
                select.select([self._in], [self._out] if to_send else [], [], PATIENCE_SECONDS)

    def _send(self, piece: memoryview) -> int:
        try:
            return self._out.send(piece)
        except BlockingIOError:
            return 0

    def _receive(self, piece: memoryview) -> int:
        try:
            return self._in.recv_into(piece)
        except BlockingIOError:
            return 0


def _piece(memory: memoryview, size: int, left: int) -> memoryview:
    """Where the next bytes are when so many of ``size`` are left."""
    begin = min((size - left) % len(memory), len(memory) - PIECE)
    return memory[begin : begin + min(PIECE, left)]


def _meeting(place: Place, rank: int) -> Path:
    return Path(f"{place.job}.port{rank}")


def _published(path: Path) -> str:
    deadline = monotonic() + PATIENCE_SECONDS
    while not path.exists():
        if monotonic() > deadline:
            raise TimeoutError(f"no neighbour at {path}")
        time.sleep(0.01)
    return path.read_text()
