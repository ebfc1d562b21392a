"""The space of cases that results are checked over: its axes, what is valid, a choice of pairs.

A case is one collective call with everything that can make a difference. ``all_cases`` yields
every valid one; ``pairwise`` chooses a few hundred so that any two values that can occur together
do occur together. What a case must give is computed in numpy, in float64, complex128 or int64,
from numbers for which all sums and products are exact in the narrowest type. ``run_cases`` is the
body that every rank runs.
"""

from __future__ import annotations

import itertools
import random
import threading
import zlib
from collections import defaultdict
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

import dpcore

FLOATS = ("float64", "float32", "float16", "bfloat16")
COMPLEX = ("complex64", "complex128")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8")
DTYPES = (*FLOATS, *INTEGERS, "bool", *COMPLEX)
ARITHMETIC = ("sum", "mean", "prod", "min", "max", "premul_sum")
BITWISE = ("band", "bor", "bxor")
OPS = (*ARITHMETIC, *BITWISE)
NO_OP = "none"  # of collectives that only move data
WORLDS = (1, 2, 3, 4, 5, 7, 8)
SIZES = (0, 1, 2, 3, 1000, 65537)

REDUCING = ("all_reduce", "reduce", "reduce_scatter")
WHOLE = ("all_reduce", "broadcast", "reduce")  # one tensor: always in place
COLLECTIVES = (*WHOLE, "reduce_scatter", "all_gather", "gather", "scatter", "all_to_all")
SAME_EVERYWHERE = ("all_reduce", "broadcast", "all_gather")
FUSED = {"all_reduce": ("one_shot", "two_shot")}  # has a "/moves" variant; elsewhere "direct"

PLAIN, ARENA = "plain", "arena"
ARENA_BUT_AT_ROOT, ARENA_AT_ROOT = "arena but at root", "arena at root"
ARENA_INPUTS, ARENA_OUTPUTS = "arena inputs", "arena outputs"
MEMORIES = (PLAIN, ARENA, ARENA_BUT_AT_ROOT, ARENA_AT_ROOT, ARENA_INPUTS, ARENA_OUTPUTS)


class Case(NamedTuple):
    call: tuple[str, str]  # collective and algorithm
    dtype: str
    op: str
    memory: str
    in_place: bool
    world: int
    size: int

    @property
    def collective(self):
        return self.call[0]

    @property
    def root(self):
        """Also where the odd memory lies when the collective has no root."""
        return zlib.crc32(repr(self).encode()) % self.world

    @property
    def asynchronous(self):
        return zlib.crc32(repr(self).encode()) >> 16 & 1 == 1

    @property
    def part(self):
        """Elements per rank where every rank has a part; the large size is that of them all."""
        if self.collective in WHOLE or self.size <= 1000:
            return self.size
        return -(-self.size // self.world)

    @property
    def content(self):
        """What the numbers depend on."""
        return self.collective, self.dtype, self.op, self.world, self.part


def algorithms(collective):
    names = dpcore.algorithms_of(collective)
    fused = FUSED.get(collective, ("direct",))
    return ("auto", *names, *(f"{name}/moves" for name in names if name in fused))


CALLS = tuple((collective, name) for collective in COLLECTIVES for name in algorithms(collective))
AXES = Case(CALLS, DTYPES, (*OPS, NO_OP), MEMORIES, (False, True), WORLDS, SIZES)
BOUND = 5  # the first axes restrict one another, the others are free


def is_valid_op(op, dtype):
    if dtype in FLOATS:
        return op in ARITHMETIC
    if dtype in COMPLEX:
        return op in ("sum", "mean", "prod", "premul_sum")
    return op in (*BITWISE, "sum", "prod", "min", "max") or (op == "mean" and dtype in INTEGERS)


def is_valid(call, dtype, op, memory, in_place):
    collective = call[0]
    if collective in REDUCING:
        if not is_valid_op(op, dtype):
            return False
    elif op != NO_OP:
        return False
    if in_place:
        return memory not in (ARENA_INPUTS, ARENA_OUTPUTS)
    return collective not in WHOLE


def valid_starts():
    """The valid values of the axes that restrict one another."""
    return [start for start in itertools.product(*AXES[:BOUND]) if is_valid(*start)]


def all_cases(world):
    """Every valid case of a world; those with the same numbers follow one another."""
    starts = sorted(valid_starts(), key=lambda start: (start[0][0], start[1], start[2]))
    for _, group in itertools.groupby(starts, key=lambda start: (start[0][0], start[1], start[2])):
        same_numbers = list(group)
        for size in SIZES:
            for start in same_numbers:
                yield Case(*start, world, size)


# ---- the choice of pairs ---------------------------------------------------------------------


def pairs_of(case):
    return set(itertools.combinations(enumerate(case), 2))


def pairwise(seed):
    """Cases in which every two values that can meet do meet: greedy, the best of a few dice."""
    dice = random.Random(seed)
    starts_with = defaultdict(list)  # no, one or two given values -> the starts that have them
    uncovered = {}  # an ordered set
    for start in valid_starts():
        values = list(enumerate(start))
        for n in range(3):
            for given in itertools.combinations(values, n):
                if n == 2:
                    uncovered[given] = None
                elif n == 1 and given not in starts_with:
                    free = enumerate(AXES[BOUND:], BOUND)
                    uncovered.update(
                        {(*given, (axis, value)): None for axis, all_ in free for value in all_}
                    )
                starts_with[given].append(start)
    for world, size in itertools.product(WORLDS, SIZES):
        uncovered[((BOUND, world), (BOUND + 1, size))] = None

    def complete(pair):
        start = dice.choice(starts_with[tuple(item for item in pair if item[0] < BOUND)])
        values = [*start, dice.choice(WORLDS), dice.choice(SIZES)]
        for axis, value in pair:
            values[axis] = value
        return Case(*values)

    chosen = []
    while uncovered:
        first = next(iter(uncovered))
        candidates = [complete(first) for _ in range(20)]
        best = max(candidates, key=lambda case: len(pairs_of(case) & uncovered.keys()))
        chosen.append(best)
        for pair in pairs_of(best):
            uncovered.pop(pair, None)
    return chosen


# ---- numbers and what must become of them ----------------------------------------------------


def premul_factor(rank):
    return 0.5 * (rank % 3 + 1)


def random_numbers(dtype, op, count, generator):
    """Of the widest type of its kind. Sums and products over 8 ranks are exact in ``dtype``."""
    if dtype == "bool":
        return generator.integers(0, 2, count).astype(bool)
    if dtype in INTEGERS:  # the whole range: sums and products wrap around
        return generator.integers(-(2**63), 2**63 - 1, count, dtype=np.int64).astype(dtype)
    if dtype in COMPLEX:
        if op == "prod":
            return generator.choice(np.array([1, -1, 1j, -1j, 1 + 1j, 2]), count)
        re, im = generator.integers(-8, 9, (2, count))
        return re + 1j * im
    if op == "prod":
        return generator.choice(np.array([1.0, -1.0, 2.0, -2.0, 0.5]), count)
    return generator.integers(-8, 9, count).astype(np.float64)


def to_tensor(wide, dtype):
    return torch.from_numpy(np.ascontiguousarray(wide)).to(getattr(torch, dtype))


def combined(op, arrays, dtype):
    if dtype == "bool":
        functions = {
            **dict.fromkeys(("sum", "max", "bor"), np.logical_or),
            **dict.fromkeys(("prod", "min", "band"), np.logical_and),
            "bxor": np.logical_xor,
        }
        return functions[op].reduce(arrays)
    if dtype in INTEGERS:
        arrays = [array.astype(np.int64) for array in arrays]  # wraps like any narrower type
    if op == "premul_sum":
        arrays = [premul_factor(rank) * array for rank, array in enumerate(arrays)]
    functions = {"prod": np.multiply, "min": np.minimum, "max": np.maximum, "band": np.bitwise_and,
                 "bor": np.bitwise_or, "bxor": np.bitwise_xor}  # fmt: skip
    total = functions.get(op, np.add).reduce(arrays)
    if dtype in INTEGERS:
        total = total.astype(dtype)
        return truncated(total, len(arrays)) if op == "mean" else total
    return total / len(arrays) if op == "mean" else total


def truncated(total, divisor):
    """Quotients of Python's own integers, rounded toward zero."""
    return np.array([abs(n) // divisor * (-1) ** (n < 0) for n in total.tolist()], total.dtype)


class Numbers(NamedTuple):
    inputs: list[torch.Tensor]  # by rank
    result: torch.Tensor | None  # of the reduction


_one_at_a_time = threading.Lock()  # ranks that are threads share the cache


def numbers_of(case):
    with _one_at_a_time:
        return _numbers(*case.content)


@lru_cache(maxsize=16)
def _numbers(collective, dtype, op, world, part):
    splits = collective in ("reduce_scatter", "scatter", "all_to_all")
    seed = zlib.crc32(repr((collective, dtype, op, world, part)).encode())
    arrays = [
        random_numbers(dtype, op, part * (world if splits else 1), np.random.default_rng([seed, r]))
        for r in range(world)
    ]
    result = to_tensor(combined(op, arrays, dtype), dtype) if collective in REDUCING else None
    return Numbers([to_tensor(array, dtype) for array in arrays], result)


def tolerance(case):
    """Relative. Only the third, fifth or seventh part of a sum can't be exact."""
    if case.op != "mean" or case.dtype in INTEGERS or case.world & (case.world - 1) == 0:
        return 0.0
    return 2 * torch.finfo(getattr(torch, case.dtype)).eps


# ---- the body that every rank runs -----------------------------------------------------------


def bytes_of(tensor):
    return tensor.contiguous().view(torch.uint8).numpy()


class Guarded:
    """A tensor between margins, which also spoil its alignment in every other world."""

    def __init__(self, comm, content, in_arena, case):
        self.margin = 3 if case.world % 2 else 16
        extent = content.numel() + 2 * self.margin
        make = comm.empty if in_arena else torch.empty
        self.whole = make(extent, dtype=content.dtype)
        self.whole.view(torch.uint8).fill_(1)
        self.tensor = self.whole[self.margin : self.margin + content.numel()]
        self.tensor.copy_(content)

    def margins_are_whole(self):
        head, tail = self.whole[: self.margin], self.whole[self.margin + self.tensor.numel() :]
        return bool((bytes_of(head) == 1).all() and (bytes_of(tail) == 1).all())


def in_arena(case, rank, is_input, is_output):
    return {
        PLAIN: False,
        ARENA: True,
        ARENA_BUT_AT_ROOT: rank != case.root,
        ARENA_AT_ROOT: rank == case.root,
        ARENA_INPUTS: is_input,
        ARENA_OUTPUTS: is_output,
    }[case.memory]


class Promise(NamedTuple):
    """What a collective takes and gives on one rank; None where the rank has no such buffer."""

    input: torch.Tensor | None
    output: torch.Tensor | None
    # In place: where in the larger of the two buffers the smaller one lies.
    own_place: int = 0


def promise_of(case, rank):
    inputs, result = numbers_of(case)
    world, part, mine = case.world, case.part, inputs[rank]
    at_root, from_root = rank == case.root, inputs[case.root]
    own = slice(rank * part, (rank + 1) * part)
    match case.collective:
        case "all_reduce":
            return Promise(mine, result)
        case "broadcast":
            return Promise(mine, from_root)
        case "reduce":
            return Promise(mine, result if at_root else mine)
        case "reduce_scatter":
            return Promise(mine, result[own], own.start)
        case "all_gather":
            return Promise(mine, torch.cat(inputs), own.start)
        case "gather":
            return Promise(mine, torch.cat(inputs) if at_root else None, own.start)
        case "scatter":
            return Promise(from_root if at_root else None, from_root[own], own.start)
        case "all_to_all":
            return Promise(mine, torch.cat([x.view(world, part)[rank] for x in inputs]))
    raise AssertionError(case.collective)


def run_case(comm, case):
    """Runs it on this rank; a fingerprint of the output, and what is wrong, if anything."""
    rank = comm.rank
    given, promised, own_place = promise_of(case, rank)
    whole = case.collective in WHOLE
    has_both = not whole and given is not None and promised is not None
    buffers = []

    def place(content, is_input, is_output):
        if content is None:
            return None
        buffers.append(Guarded(comm, content, in_arena(case, rank, is_input, is_output), case))
        return buffers[-1].tensor

    if whole:
        source = target = place(given, True, True)
    elif case.in_place and has_both:
        larger = given if given.numel() >= promised.numel() else torch.zeros_like(promised)
        source = target = place(larger, True, True)
        if given.numel() > promised.numel():
            target = source[own_place : own_place + promised.numel()]
        elif given.numel() < promised.numel():
            source = target[own_place : own_place + given.numel()]
            source.copy_(given)
    else:
        source = place(given, True, False)
        target = place(None if promised is None else torch.zeros_like(promised), False, True)

    options = {"async_op": case.asynchronous}
    if case.call[1] != "auto":
        options["algorithm"] = case.call[1]
    if case.op != NO_OP:
        options["op"] = case.op
        options["factor"] = premul_factor(rank)
    if case.collective in ("broadcast", "reduce", "gather", "scatter"):
        options["root"] = case.root
    work = getattr(comm, case.collective)(*((target,) if whole else (target, source)), **options)
    if case.asynchronous:
        work.wait()

    problems = []
    if target is not None and not agrees(target, promised, tolerance(case)):
        problems.append(f"gives {target.tolist()[:8]}, not {promised.tolist()[:8]}")
    if has_both and not case.in_place and not torch.equal(source, given):
        problems.append("changes its input")
    if case.in_place and has_both and given.numel() > promised.numel():
        source[own_place : own_place + promised.numel()] = given[own_place:][: promised.numel()]
        if not torch.equal(source, given):
            problems.append("changes the other ranks' parts of its input")
    if not all(buffer.margins_are_whole() for buffer in buffers):
        problems.append("writes outside of its buffer")
    fingerprint = zlib.crc32(bytes_of(target)) if case.collective in SAME_EVERYWHERE else 0
    return fingerprint, [f"rank {rank} of {case}: {problem}" for problem in problems]


def agrees(actual, expected, relative):
    if relative == 0.0:
        return torch.equal(actual, expected)
    wide = torch.complex128 if actual.is_complex() else torch.float64
    return torch.allclose(actual.to(wide), expected.to(wide), rtol=relative, atol=0.0)


def run_cases(comm, cases):
    """Fingerprints in the order of the cases, and problems."""
    fingerprints, problems = [], []
    for case in cases:
        try:
            fingerprint, wrong = run_case(comm, case)
        except Exception as error:
            raise AssertionError(f"rank {comm.rank} of {case}") from error
        fingerprints.append(fingerprint)
        problems += wrong
    return fingerprints, problems
