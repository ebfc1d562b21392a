"""Reads mscclpp's execution plans: JSON with gpus, their thread blocks, and the operations of each.

An operation reads and writes memory of its own gpu, and of others: by a buffer of a peer, or
through the switch, which reads or writes the same slots of all. Signals over channels, barriers and
semaphores put operations in order. Packets carry a flag with their data, so that what reads them
waits for them. Where a group of thread blocks shares an operation, each does its part of every
chunk. A pipeline is read as one turn of its loop, which does for all data what a turn does for a
piece.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dpcore.reference.plans.blocks import (
    Block,
    BlockPlan,
    Buffers,
    PlanError,
    Queue,
    Slot,
    Step,
    Sum,
    collective_of,
)  # fmt: skip

# Each source to its target; all sources added, to each target; and which sources are packets.
_COPIES: dict[str, int | None] = dict.fromkeys(
    ("put", "pws", "pwsf", "get", "copy", "ppkt", "cpkt", "gstore", "gstorepkt")
)
_COPIES |= {"upkt": 0, "rppkt": 0}
_SUMS: dict[str, int | None] = dict.fromkeys(("re", "res", "rre", "rres", "glres"))
_SUMS |= {"repkt": 1, "respkt": 1, "recpkt": 1, "recspkt": 1}
_SIGNALS = ("signal", "rlxsignal", "pws", "pwsf")
_WAITS = ("wait", "rlxwait")
_SILENT = ("nop", "flush", "barrier", "sem_acquire", "sem_release", *_WAITS, *_SIGNALS[:2])


def read(path: Path) -> BlockPlan:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise PlanError("this is no text") from None
    except json.JSONDecodeError as problem:
        raise PlanError(f"line {problem.lineno}: this is no whole JSON ({problem.msg})") from None
    gpus = _get(content, "gpus", list, "the plan")
    ids = [_get(gpu, "id", int, f"gpus[{rank}]") for rank, gpu in enumerate(gpus)]
    if ids != list(range(len(gpus))) or not gpus:
        raise PlanError(f"gpus: their ids are {ids}, and must count from 0")
    collective = collective_of(_get(content, "collective", str, "the plan"))
    operations = [one for rank, gpu in enumerate(gpus) for one in _operations(rank, gpu)]
    parts = math.lcm(1, *(_group(op, place)[1] for _, place, op in operations))
    sizes = [
        [
            _get(gpu, f"{name}_chunks", int, f"gpus[{rank}]")
            for name in ("input", "output", "scratch")
        ]
        for rank, gpu in enumerate(gpus)
    ]
    chunks = max(size for given in sizes for size in given[:2]) * parts
    in_place = _get(content, "inplace", bool, "the plan")
    buffers = Buffers(collective, len(gpus), chunks, in_place, [of[2] * parts for of in sizes])
    reader = _Reader(gpus, buffers, parts)
    blocks: dict[Block, list[Step]] = {}
    for block, place, operation in operations:
        try:
            blocks.setdefault(block, []).append(reader.step(block, place, operation))
        except PlanError as problem:
            said = str(problem)
            raise PlanError(said if said.startswith("gpus[") else f"{place}: {said}") from None
        except (
            LookupError,
            TypeError,
            AttributeError,
        ) as problem:  # in what the operation refers to
            raise PlanError(f"{place} is not as mscclpp writes it ({problem})") from None
    given: dict[Queue, int] = {}
    for rank, gpu in enumerate(gpus):
        for number, semaphore in enumerate(_of(gpu, "semaphores")):
            place = f"gpus[{rank}].semaphores[{number}]"
            given[_semaphore(rank, number)] = _get(semaphore, "init_value", int, place)
    return BlockPlan(
        _get(content, "name", str, "the plan"), collective, len(gpus), buffers.chunks, blocks,
        buffers.begins(), buffers.ends(), given,
    )  # fmt: skip


def _get(found: Any, name: str, kind: type, place: str) -> Any:
    if not isinstance(found, dict) or name not in found:
        raise PlanError(
            f"{place} has no {name!r}: this is no plan of mscclpp, or of another version"
        )
    if not isinstance(found[name], kind) or (kind is int and isinstance(found[name], bool)):
        raise PlanError(
            f"{place}.{name} is {found[name]!r:.40}, and must be of type {kind.__name__}"
        )
    return found[name]


def _operations(rank: int, gpu: Any) -> Iterator[tuple[Block, str, dict[str, Any]]]:
    """Of all thread blocks, with a pipeline's in its place."""
    of_gpu = f"gpus[{rank}]"
    for number, block in enumerate(_get(gpu, "threadblocks", list, of_gpu)):
        of_block = f"{of_gpu}.threadblocks[{number}]"
        for i, operation in enumerate(_get(block, "ops", list, of_block)):
            place = f"{of_block}.ops[{i}]"
            if _get(operation, "name", str, place) != "pipeline":
                yield (rank, number), place, operation
                continue
            for j, inner in enumerate(_get(operation, "ops", list, place)):
                _get(inner, "name", str, f"{place}.ops[{j}]")
                yield (rank, number), f"{place}.ops[{j}]", inner


def _group(operation: dict[str, Any], place: str) -> tuple[int, int]:
    """Which part of how many a thread block does."""
    if "tbg_info" not in operation:
        return 0, 1
    number, size = (
        _get(operation["tbg_info"], name, int, f"{place}.tbg_info")
        for name in ("tb_id", "tbg_size")
    )
    if not 0 <= number < size <= 1024:
        raise PlanError(f"{place}.tbg_info: {number} of {size} thread blocks")
    return number, size


def _semaphore(rank: int, number: int) -> Queue:
    return ("of semaphore {1} of gpu {0}", rank, number)


class _Reader:
    """``parts``: how many slots stand for a chunk of the file."""

    def __init__(self, gpus: Sequence[dict[str, Any]], buffers: Buffers, parts: int) -> None:
        self._gpus, self._buffers, self._parts = gpus, buffers, parts

    def step(self, block: Block, place: str, operation: dict[str, Any]) -> Step:
        name = operation["name"]
        if name not in {*_COPIES, *_SUMS, *_SILENT}:
            raise PlanError(f"there is no operation {name!r} in the versions that are known")
        sums: tuple[Sum, ...] = ()
        filled: tuple[Slot, ...] = ()
        if name not in _SILENT:
            sources = [
                self._slots(block, operation, one, place) for one in _of(operation, "src_buff")
            ]
            targets = [
                self._slots(block, operation, one, place) for one in _of(operation, "dst_buff")
            ]
            if not sources or not targets:
                raise PlanError(f"{name} lacks src_buff or dst_buff")
            sums = tuple(_sums(name, sources, targets))
            first = (_COPIES | _SUMS)[name]
            if first is not None:
                filled = tuple(slot for chunks in sources[first:] for of in chunks for slot in of)
        channels = _of(operation, "channel_ids") if name in (*_SIGNALS, *_WAITS) else []
        mine = [self._channel(block, operation, number) for number in channels]
        meets = None
        if name == "barrier":
            number, blocks = (
                _get(operation, one, int, place) for one in ("barrier_id", "num_threadblocks")
            )
            meets = (("{1} of gpu {0}", block[0], number), blocks)
        semaphores = tuple(
            _semaphore(block[0], int(number)) for number in _of(operation, "semaphore_ids")
        )
        return Step(
            f"{place} ({name})",
            sums,
            signals=(
                tuple(
                    _signal(block[0], peer, channel) for peer, channel in mine if name in _SIGNALS
                )
                + (semaphores if name == "sem_release" else ())
            ),
            waits=(
                tuple(_signal(peer, block[0], channel) for peer, channel in mine if name in _WAITS)
                + (semaphores if name == "sem_acquire" else ())
            ),
            filled=filled,
            meets=meets,
        )

    def _slots(
        self, block: Block, operation: dict[str, Any], asked: Any, place: str
    ) -> list[tuple[Slot, ...]]:
        """For each chunk its slot; through the switch, the same slots of several gpus."""
        rank = block[0]
        index, size = (_get(asked, name, int, place) for name in ("index", "size"))
        number, group = _group(operation, place)
        count = size * self._parts // group
        first = index * self._parts + number * count
        ranks, buffer = [rank], asked.get("type")
        if "buffer_id" in asked:
            references = [
                one
                for reference in self._of_block(block, "remote_buffer_refs")
                if reference["access_channel_type"] == operation.get("channel_type")
                for one in reference["remote_buffer_ids"]
            ]
            remote = self._gpus[rank]["remote_buffers"][_pick(references, asked["buffer_id"])]
            ranks, buffer = [remote["rank"]], remote["type"]
        elif "switch_channel_id" in asked:
            channel = _pick(self._ids(block, "switch"), asked["switch_channel_id"])
            groups = [
                (one.get("buffer_type", one.get("buff")), group["ranks"])
                for one in self._gpus[rank]["channels"]
                if one["channel_type"] == "switch"
                for group in one["rank_groups"]
            ]
            buffer, ranks = _pick(groups, channel)
        self._check_ranks(ranks)
        return [
            *zip(*(self._buffers.slots(one, buffer, first, count) for one in ranks), strict=True)
        ]

    def _check_ranks(self, ranks: list[Any]) -> None:
        if any(one not in range(len(self._gpus)) for one in ranks):
            raise PlanError(f"it is about gpus {ranks}, and there are {len(self._gpus)}")

    def _of_block(self, block: Block, name: str) -> list[Any]:
        found: list[Any] = self._gpus[block[0]]["threadblocks"][block[1]].get(name, [])
        return found

    def _ids(self, block: Block, kind: str) -> list[int]:
        channels = self._of_block(block, "channels")
        return [i for one in channels if one["channel_type"] == kind for i in one["channel_ids"]]

    def _channel(
        self, block: Block, operation: dict[str, Any], number: int
    ) -> tuple[int, tuple[str, int]]:
        """Its peer, kind, and which one it is of those to this peer."""
        kind = operation.get("channel_type", "")
        peers = [
            peer
            for one in self._gpus[block[0]]["channels"]
            if one["channel_type"] == kind
            for peer in one["connected_to"]
        ]
        channel = _pick(self._ids(block, kind), number)
        peer = _pick(peers, channel)
        self._check_ranks([peer])
        return peer, (kind, peers[:channel].count(peer))


def _pick(found: Sequence[Any], number: Any) -> Any:
    if not isinstance(number, int) or not 0 <= number < len(found):
        raise PlanError(
            f"number {number!r} of channels or buffers, of which there are {len(found)}"
        )
    return found[number]


def _of(operation: dict[str, Any], name: str) -> list[Any]:
    found = operation.get(name, [])
    if not isinstance(found, list):
        raise PlanError(f"{name} is {found!r:.40}, and must be a list")
    return found


def _sums(
    name: str, sources: list[list[tuple[Slot, ...]]], targets: list[list[tuple[Slot, ...]]]
) -> Iterator[Sum]:
    if name in _SUMS:
        for chunk in zip(*sources, *targets, strict=True):
            added, written = chunk[: len(sources)], chunk[len(sources) :]
            yield Sum(
                tuple(s for one in added for s in one), tuple(t for one in written for t in one)
            )
        return
    for number, target in enumerate(targets):
        source = sources[number] if len(sources) == len(targets) else sources[0]
        for read, written in zip(source, target, strict=True):
            yield Sum(read, written)


def _signal(source: int, target: int, channel: tuple[str, int]) -> Queue:
    kind, number = channel
    return ("of gpu {0} to gpu {1} over {2} channel {3}", source, target, kind, number)
