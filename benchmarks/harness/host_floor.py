"""dpcore's all-reduce of two ranks of a host beside the same without dpcore, in host_floor.c, in
turns. The C file is compiled where it runs, for the processor that it runs on."""

from __future__ import annotations

import ctypes
import mmap
import os
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

import dpcore as dp
from benchmarks.harness.figures import source, time_text
from dpcore.tools.sizes import size_text

SOURCE = Path(__file__).with_name("host_floor.c")
PARTS = (32 << 10, 128 << 10, 512 << 10)  # bytes that go through a buffer of the stage at a time
_STAGE_BYTES = 4 * PARTS[-1]
_CALL_SECONDS = 5e-3  # about what the calls of a round take
_BYTES_PER_SECOND = 2e10  # of a call, to find out how many those are

Array = np.ndarray[Any, Any]
Call = Callable[[], object]


def compiled(folder: Path) -> Path:
    library = folder / "host_floor.so"
    options = ["-O2", "-march=native", "-shared", "-fPIC"]
    subprocess.run(["cc", *options, "-o", library, SOURCE], check=True)
    return library


class Floor:
    """Of a rank: the calls of host_floor.c, in memory that both ranks map from a folder."""

    def __init__(self, comm: Any, folder: Path, largest: int) -> None:
        self.comm = comm
        self.code = ctypes.CDLL(str(folder / "host_floor.so"))
        self.number = ctypes.c_uint64(1)
        self.progress = _mapped(folder / "progress", 4096)
        self.stages, self.buffers = (
            [_mapped(folder / f"{name}{rank}", size) for rank in range(2)]
            for name, size in (("stage", _STAGE_BYTES), ("buffer", largest))
        )
        comm.barrier()

    def _call(self, name: str, numbers: int, *arguments: Any) -> Call:
        function = getattr(self.code, name)
        progress, rank = _at(self.progress), self.comm.rank

        def call() -> None:
            function(progress, rank, self.number, *arguments)
            self.number.value += numbers

        return call

    def meet(self) -> Call:
        return self._call("meet", 1)

    def mapped(self, size: int) -> Call:
        return self._call("mapped", 1, _both(self.buffers), ctypes.c_size_t(size // 4))

    def ordinary(self, data: Array, parts: int) -> Call:
        count = ctypes.c_size_t(data.size)
        stages = _both(self.stages)
        return self._call("ordinary", parts, _at(data), stages, count, ctypes.c_size_t(parts))


def _mapped(path: Path, size: int) -> Array:
    with path.open("a+b") as file:
        os.truncate(file.fileno(), size)
        memory = mmap.mmap(file.fileno(), size)
    array = np.frombuffer(memory, dtype=np.float32)
    array[:] = 0  # its pages are there before anything is timed
    return array


def _at(array: Array) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _both(arrays: Sequence[Array]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * 2)(*[array.ctypes.data for array in arrays])


def measure(comm: Any, folder: str, sizes: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """On a rank: for each size, and tensors of the arena and others, a line of microseconds.

    ``of_floor``: the median of the rounds' quotients of the floor and dpcore; 1: level with it.
    ``apart``: what both ranks take to see a number of each other's, in the same rounds.
    """
    floor, lines = Floor(comm, Path(folder), max(sizes)), []
    for size in sizes:
        data, other = np.zeros(size // 4, np.float32), np.zeros(size // 4, np.float32)
        arena = comm.empty(size // 4)
        calls: dict[str, Call] = {
            "apart": floor.meet(),
            "mapped": floor.mapped(size),
            "arena": partial(comm.all_reduce, arena),
            "ordinary": partial(comm.all_reduce, data),
        }
        for part in PARTS:
            if 2 * part <= size:
                calls[f"through {part}"] = floor.ordinary(other, size // part)
        often = max(3, min(1000, round(_CALL_SECONDS * _BYTES_PER_SECOND / size)))
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                comm.barrier()
                begin = perf_counter()
                for _ in repeat(None, often):
                    call()
                times[name].append((perf_counter() - begin) / often * 1e6)
        through = [times[name] for name in times if name.startswith("through")]
        fastest = [min(one) for one in zip(*through, strict=True)]
        floors = {"arena": times["mapped"], "ordinary": fastest}
        for kind, least in floors.items():
            lines.append({
                "what": f"all_reduce, {kind}",
                "bytes": size,
                "floor": statistics.median(least),
                "dpcore": statistics.median(times[kind]),
                "of_floor": statistics.median(
                    one / ours for one, ours in zip(least, times[kind], strict=True)
                ),
                "apart": statistics.median(times["apart"]),
            })  # fmt: skip
    return lines


def run(sizes: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="dpcore-", dir="/dev/shm") as folder:
        compiled(Path(folder))
        lines: list[dict[str, Any]] = dp.spawn(measure, 2, folder, sizes, rounds, timeout=120)[0]
        return lines


def name_of(line: dict[str, Any]) -> str:
    return f"{line['what'].removeprefix('all_reduce, ')}, {size_text(line['bytes'])}"


def table_of_floors(records: list[dict[str, Any]]) -> str:
    """A row for each size and kind of memory, from the runs in which the two processors were
    nearest and farthest."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        if "of_floor" in record:
            runs.setdefault(record["date"], []).append(record)
    by_way = sorted(runs.values(), key=_way)
    shown = [by_way[0], by_way[-1]] if len(by_way) > 1 else by_way
    heads = [f"{_way(run):.2f} µs apart: {name}" for run in shown for name in ("floor", "dpcore")]
    lines = ["| all-reduce of 2 ranks | " + " | ".join(heads) + " |"]
    lines += ["|---|" + "---:|" * len(heads)]
    for row in zip(*shown, strict=True):
        cells = [name_of(row[0])]
        for cell in row:
            floor, ours = (time_text(cell[name] * 1e-6) for name in ("floor", "dpcore"))
            cells += [floor, f"{ours} ({cell['of_floor']:.2f})"]
        lines.append("| " + " | ".join(cells) + " |")
    used = [record for run in shown for record in run]
    lines += ["", source("floors", used, "../", "Medians of one run each,")]
    return "\n".join(lines) + "\n"


def _way(run: list[dict[str, Any]]) -> float:
    return min(float(record["apart"]) for record in run)
