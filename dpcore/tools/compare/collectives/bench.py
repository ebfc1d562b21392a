"""``dpcore bench``: times of collectives, in the columns of nccl-tests.

Every row is checked as well as timed: the inputs are small whole numbers that follow a formula
of rank and position, so every rank knows the result in advance, exactly, in any type.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dpcore._version import __version__
from dpcore.comm.launch.identity import is_launched
from dpcore.errors import Unsupported
from dpcore.tools.compare.collectives.bench_cases import CASES, DTYPES, OPS
from dpcore.tools.diagnose import calibrate
from dpcore.tools.sizes import parse_sizes

if TYPE_CHECKING:
    from dpcore.comm.communicators.native import Communicator

_DEFAULT_WORLD = 2
_DEFAULTS: dict[str, Any] = {
    "collective": "all_reduce",
    "sizes": parse_sizes("8:64M:4x"),
    "dtype": "float32",
    "op": "sum",
    "algorithm": "auto",
}
_TIMEOUT_SECONDS = 60.0


@dataclass(frozen=True)
class Plan:
    """What to measure; travels to the ranks."""

    collectives: tuple[str, ...]
    sizes: tuple[int, ...]
    dtype: str = "float32"
    op: str = "sum"
    algorithms: tuple[str, ...] = ("auto",)
    plain: bool = False
    seconds: float = 0.2
    json: bool = False

    def __post_init__(self) -> None:
        for name, value, known in (("dtype", self.dtype, DTYPES), ("op", self.op, OPS)):
            if value not in known:
                raise Unsupported(f"--{name} {value!r}: choose from {', '.join(known)}")


@dataclass(frozen=True)
class Row:
    """One line of the output. Sizes in bytes, times in microseconds, bandwidths in GB/s."""

    collective: str
    world: int
    algorithm: str
    memory: str
    size: int
    count: int
    type: str
    redop: str
    root: int
    time: float
    algbw: float
    busbw: float
    wrong: int
    iterations: int
    version: str = __version__


def parse_collectives(text: str) -> tuple[str, ...]:
    """Names with commas between them, or "all"."""
    names = tuple(CASES) if text == "all" else tuple(text.split(","))
    unknown = [name for name in names if name not in CASES]
    if unknown:
        raise Unsupported(f"--collective {unknown[0]!r}: choose from {', '.join(CASES)}, or all")
    return names


def run(options: argparse.Namespace) -> int:
    """Measures and prints; the exit status. Under a launcher on its ranks, else on own ones."""
    given = {name: getattr(options, name) for name in _DEFAULTS}
    given = {name: value for name, value in given.items() if value is not None}
    if options.calibrate:
        others = [*given, *(name for name in ("world", "plain") if getattr(options, name))]
        for name in others:
            raise Unsupported(f"--{name} is not for --calibrate, which always measures the same")
        return calibrate.run(options.json, options.seconds)
    asked = _DEFAULTS | given
    plan = Plan(
        collectives=parse_collectives(asked["collective"]),
        sizes=asked["sizes"],
        dtype=asked["dtype"],
        op=asked["op"],
        algorithms=tuple(asked["algorithm"].split(",")),
        plain=options.plain,
        seconds=options.seconds,
        json=options.json,
    )
    world: int | None = options.world
    if not is_launched():
        from dpcore.comm.launch.spawn import spawn

        ranks = _DEFAULT_WORLD if world is None else world
        results = spawn(lambda comm: measure(comm, plan), ranks, timeout=_TIMEOUT_SECONDS)
        return int(any(results))
    from dpcore.comm.launch.session import finalize, init

    comm = init(timeout=_TIMEOUT_SECONDS)
    if world not in (None, comm.world_size):
        raise Unsupported(f"--world {world}, but the launcher started {comm.world_size} ranks")
    wrong = measure(comm, plan)
    finalize()
    return int(wrong > 0)


def measure(comm: Communicator, plan: Plan) -> int:
    """Runs on every rank; rank 0 prints. Returns the number of wrong elements of all ranks."""
    output = _Output(comm, plan) if comm.rank == 0 else None
    wrong = 0
    for row in rows(comm, plan):
        wrong += row.wrong
        if output is not None:
            output.add(row)
    if output is not None:
        output.finish()
    return wrong


def rows(comm: Communicator, plan: Plan) -> Iterator[Row]:
    """Measures one row after the other, the same ones on every rank."""
    memory = "plain" if plan.plain else "arena"
    for name in plan.collectives:
        case = CASES[name]
        # Sizes that a collective can't have become the next smaller that it can; none comes twice.
        near = [case.size_near(size, plan.dtype, comm.world_size) for size in plan.sizes]
        for algorithm in plan.algorithms:
            for size in dict.fromkeys(near):
                measured = case.prepare(comm, size, plan.dtype, plan.op, algorithm, plan.plain)
                seconds, iterations = _seconds(comm, measured.call, plan.seconds)
                algbw = size / seconds * 1e-9
                yield Row(
                    collective=name,
                    world=comm.world_size,
                    algorithm=algorithm,
                    memory=memory,
                    size=size,
                    count=measured.count,
                    type=plan.dtype,
                    redop=plan.op if case.reduces else "none",
                    root=0 if case.rooted else -1,
                    time=round(seconds * 1e6, 3),
                    algbw=round(algbw, 4),
                    busbw=round(algbw * case.bus_factor(comm.world_size), 4),
                    wrong=measured.check(),
                    iterations=iterations,
                )


def _seconds(comm: Communicator, call: Callable[[], Any], budget: float) -> tuple[float, int]:
    """Seconds per call on the slowest rank, and of how many calls."""
    import numpy as np

    def loop(iterations: int) -> float:
        comm.barrier()
        begin = time.perf_counter()
        for _ in range(iterations):
            call()
        slowest = np.array([time.perf_counter() - begin])
        comm.all_reduce(slowest, "max")
        return float(slowest[0]) / iterations

    loop(2)  # the first calls allocate and touch memory
    estimate = loop(3)
    iterations = min(20_000, max(3, int(budget / estimate)))  # the same on all ranks: from a max
    return loop(iterations), iterations


class _Output:
    """What rank 0 prints: a line per row as soon as it is there."""

    _COLUMNS = (
        ("size", "(B)", 11), ("count", "(elements)", 11), ("type", "", 9), ("redop", "", 6),
        ("root", "", 5), ("algorithm", "", 18), ("time", "(us)", 11), ("algbw", "(GB/s)", 8),
        ("busbw", "(GB/s)", 8), ("#wrong", "", 7),
    )  # fmt: skip

    def __init__(self, comm: Communicator, plan: Plan) -> None:
        from rich.console import Console

        from dpcore.base.machine import machine

        self._json = plan.json
        self._console = Console(highlight=False)
        self._rows: list[Row] = []
        self._collective = ""
        if not self._json:
            facts = machine()
            self._line(
                f"# dpcore {__version__}: {comm.world_size} ranks on {facts['processors']} "
                f"processors ({facts['processor']})"
            )
            self._line(
                f"# {'ordinary tensors' if plan.plain else 'tensors in the arena'}, in place where "
                "the collective is, time of the slowest rank"
            )

    def add(self, row: Row) -> None:
        self._rows.append(row)
        if self._json:
            print(json.dumps(asdict(row)), flush=True)
            return
        if row.collective != self._collective:
            self._collective = row.collective
            self._line("#")
            self._line(f"# {row.collective}", "bold")
            self._line("#" + " ".join(f"{name:>{width}}" for name, _, width in self._COLUMNS)[1:])
            self._line("#" + " ".join(f"{unit:>{width}}" for _, unit, width in self._COLUMNS)[1:])
        fields = (
            row.size, row.count, row.type, row.redop, row.root, row.algorithm, f"{row.time:.2f}",
            f"{row.algbw:.3f}", f"{row.busbw:.3f}", row.wrong,
        )  # fmt: skip
        text = " ".join(
            f"{field:>{width}}" for field, (_, _, width) in zip(fields, self._COLUMNS, strict=True)
        )
        self._line(text, "bold red" if row.wrong else "")

    def finish(self) -> None:
        if self._json:
            return
        wrong = sum(row.wrong for row in self._rows)
        mean = sum(row.busbw for row in self._rows) / max(1, len(self._rows))
        self._line("#")
        self._line(f"# wrong elements: {wrong} {'OK' if wrong == 0 else 'FAILED'}")
        self._line(f"# average bus bandwidth: {mean:.3f} GB/s")

    def _line(self, text: str, style: str = "") -> None:
        self._console.print(text, style=style or None, markup=False, soft_wrap=True)
