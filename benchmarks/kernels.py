"""How close are the reduction kernels to what the memory allows? `python -m benchmarks.kernels`"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from dpcore import _C
from dpcore.tools.ratios import in_turn
from dpcore.tools.records import keep, run_facts
from dpcore.tools.sizes import parse_sizes, size_text

DESCRIPTION = """\
One thread averages two arrays of the given size in place, the work of one rank of two in an
all-reduce (integers: adds them). The bounds touch the same bytes: `scale` multiplies an array of
twice the size by a number, `memcpy` copies one array onto the other (half the bytes). All in GB/s
of bytes read plus bytes written, medians of interleaved rounds, less the cost of an empty call from
Python. DPCORE_SIMD=avx2 or portable in the environment measures a lower instruction set.
"""
DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int32": torch.int32,
    "uint8": torch.uint8,
}
ROUND_SECONDS = 0.01
ALIGNMENT = 4096  # of every array, as in an arena


@dataclass(frozen=True)
class Contender:
    name: str
    call: Callable[[], object]
    empty_call: Callable[[], object]
    touched: int  # bytes read plus bytes written


def page_aligned(count: int, dtype: torch.dtype) -> torch.Tensor:
    raw = torch.empty(count * dtype.itemsize + ALIGNMENT, dtype=torch.uint8)
    start = -raw.data_ptr() % ALIGNMENT
    return raw[start : start + count * dtype.itemsize].view(dtype).fill_(1)


def average(dtype: str, size: int) -> Contender:
    count = size // DTYPES[dtype].itemsize
    arrays = [page_aligned(count, DTYPES[dtype]) for _ in range(2)]
    addresses = [array.data_ptr() for array in arrays]
    factor = 0.5 if DTYPES[dtype].is_floating_point else 1.0

    def reduce(elements: int, _owners: object = arrays) -> None:
        _C._reduce(dtype, "sum", addresses, addresses, elements, factor)

    return Contender(dtype, partial(reduce, count), partial(reduce, 0), 4 * size)


def scale(size: int) -> Contender:
    data = page_aligned(2 * size // 4, torch.float32)
    # By one: a smaller factor would end in denormal numbers, which are slow to multiply.
    return Contender("scale", partial(data.mul_, 1.0), partial(data[:0].mul_, 1.0), 4 * size)


def copy(size: int) -> Contender:
    arrays = [page_aligned(size, torch.uint8) for _ in range(2)]

    def copy_bytes(n: int) -> None:
        _C._copy_bytes(arrays[0].data_ptr(), arrays[1].data_ptr(), n)

    return Contender("memcpy", partial(copy_bytes, size), partial(copy_bytes, 0), 2 * size)


def seconds_of(call: Callable[[], object], iterations: int) -> float:
    start = time.perf_counter()
    for _ in range(iterations):
        call()
    return (time.perf_counter() - start) / iterations


def measure(contenders: list[Contender], rounds: int) -> list[list[float]]:
    """GB/s of every round, for every contender in turn."""
    plans = []
    for contender in contenders:
        seconds_of(contender.call, 2)
        once = seconds_of(contender.call, 3)
        plans.append(max(1, min(10_000, int(ROUND_SECONDS / once))))
    rates: list[list[float]] = [[] for _ in contenders]
    turns = list(zip(contenders, plans, rates, strict=True))
    for number in range(rounds):
        for contender, iterations, rate in in_turn(turns, number):
            busy = seconds_of(contender.call, iterations)
            empty = seconds_of(contender.empty_call, min(iterations, 100))
            rate.append(contender.touched / max(busy - empty, 1e-9) / 1e9)
    return rates


def contenders_of(size: int, dtypes: list[str]) -> list[Contender]:
    bounds = [scale(size), copy(size)]
    return bounds + [average(dtype, size) for dtype in dtypes]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add(
        "--sizes", default="64K,256K,1M,8M,64M", metavar="SIZES",
        help="bytes of one array, as 64K,1M or 64K:64M:4x (default %(default)s)",
    )  # fmt: skip
    add("--dtypes", default=",".join(DTYPES), metavar="NAMES", help="default %(default)s")
    add("--rounds", type=int, default=15, metavar="N", help="default %(default)s")
    add("--records", type=Path, metavar="FILE", help="append one JSON line per figure")
    return made


def main() -> None:
    made = parser()
    arguments = made.parse_args()
    dtypes = arguments.dtypes.split(",")
    if unknown := set(dtypes) - set(DTYPES):
        made.error(f"--dtypes: {unknown.pop()!r} is not one of {', '.join(DTYPES)}")
    try:
        sizes = parse_sizes(arguments.sizes)
    except ValueError as error:
        made.error(f"--sizes: {error}")
    if arguments.rounds < 1 or min(sizes) < max(DTYPES[name].itemsize for name in dtypes):
        made.error("--rounds: at least 1; --sizes: at least one element")
    torch.set_num_threads(1)
    facts = run_facts({"": {"torch": torch.__version__}}, {"rounds": arguments.rounds})
    facts |= {"simd": _C.simd_level()}
    print(f"# {facts['simd']}, GB/s read plus written, median of {arguments.rounds} rounds")
    names = ["scale", "memcpy", *dtypes]
    print("size".rjust(8), *(name.rjust(9) for name in names))
    for size in sizes:
        contenders = contenders_of(size, dtypes)
        rates = measure(contenders, arguments.rounds)
        medians = [statistics.median(rate) for rate in rates]
        print(size_text(size).rjust(8), *(f"{median:9.2f}" for median in medians), flush=True)
        lines = [
            {
                "kernel": contender.name,
                "bytes": size,
                "touched": contender.touched,
                "gb_per_s": median,
                "of_scale": median / medians[0],
                "rounds_gb_per_s": rate,
            }
            for contender, rate, median in zip(contenders, rates, medians, strict=True)
        ]
        keep(arguments.records, facts, lines)


if __name__ == "__main__":
    main()
