"""Reads MSCCLang's XML: the algorithms of MSCCL and of what synthesizes them (SCCL, TACCL, TE-CCL).

``<algo>`` has a ``<gpu>`` for each rank, that has thread blocks, ``<tb>``, and those have steps. A
thread block has at most one peer to which it sends and one from which it receives, over a channel.
Messages between two gpus over a channel come in the order in which they were sent. A step names
slots by buffer, offset and count, and with ``depid`` and ``deps`` a step of another thread block
of the same gpu, which must be done before. TE-CCL adds ``<copy>``: from input to output, before all
steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from xml.parsers import expat

from dpcore.reference.plans.blocks import (
    MOST_CHUNKS,
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

# What a step does: takes a message, reads what is at its source, at its destination; writes to
# its destination, sends.
_TYPES = {
    "s": "read send",
    "r": "receive write",
    "rcs": "receive write send",
    "rrc": "receive read write",
    "rrs": "receive read send",
    "rrcs": "receive read write send",
    "cpy": "read write",
    "re": "read add write",
    "nop": "",
}
_INSIDE = {"algo": "", "gpu": "algo", "copy": "gpu", "tb": "gpu", "step": "tb"}


@dataclass
class _Element:
    name: str
    line: int
    attributes: dict[str, str]
    children: list[_Element] = field(default_factory=list)

    def text(self, name: str) -> str:
        if name not in self.attributes:
            raise PlanError(f"line {self.line}: <{self.name}> has no {name}")
        return self.attributes[name]

    def number(self, name: str, default: int | None = None) -> int:
        if default is not None and name not in self.attributes:
            return default
        text = self.text(name)
        try:
            return int(text)
        except ValueError:
            raise PlanError(f"line {self.line}: {name}={text!r:.40} is no number") from None


def read(path: Path) -> BlockPlan:
    algo = _tree(path)
    world = algo.number("ngpus")
    gpus = {gpu.number("id"): gpu for gpu in algo.children}
    if len(algo.children) != world or sorted(gpus) != list(range(world)):
        raise PlanError(f"line {algo.line}: ngpus={world}, and the ids of its gpus are {[*gpus]}")
    try:
        collective = collective_of(algo.text("coll"))
        buffers = Buffers(
            collective, world, algo.number("nchunksperloop"), algo.number("inplace", 0) == 1,
            [gpus[rank].number("s_chunks", 0) for rank in range(world)],
        )  # fmt: skip
    except PlanError as problem:
        raise _at(algo, "", problem) from None
    return BlockPlan(
        name=algo.text("name"),
        collective=collective,
        world=world,
        chunks=buffers.chunks,
        blocks={
            (rank, block.number("id")): _steps(rank, block, world, buffers)
            for rank, gpu in sorted(gpus.items())
            for block in gpu.children
            if block.name == "tb"
        },
        begins=buffers.begins() | _copied(gpus, buffers),
        ends=buffers.ends(),
        given={},
    )


def _copied(gpus: dict[int, _Element], buffers: Buffers) -> dict[Slot, int]:
    """What output holds from the beginning, since it is copied there."""
    begins = buffers.begins()
    copied = {}
    for rank, gpu in gpus.items():
        for copy in gpu.children:
            if copy.name == "copy":
                try:
                    (source,) = buffers.slots(rank, "i", copy.number("i_off"))
                    (target,) = buffers.slots(rank, "o", copy.number("o_off"))
                except PlanError as problem:
                    raise _at(copy, f" (gpu {rank})", problem) from None
                copied[target] = begins[source]
    return copied


def _at(element: _Element, place: str, problem: PlanError) -> PlanError:
    said = str(problem)
    return PlanError(said if said.startswith("line ") else f"line {element.line}{place}: {said}")


def _steps(rank: int, block: _Element, world: int, buffers: Buffers) -> list[Step]:
    steps = []
    for number, step in enumerate(block.children):
        place = f" (gpu {rank}, thread block {block.number('id')}, step {number})"
        if step.number("s") != number:
            raise PlanError(f"line {step.line}: s={step.number('s')}, and it is step {number}")
        try:
            steps.append(_step(rank, block, step, f"line {step.line}{place}", world, buffers))
        except PlanError as problem:
            raise _at(step, place, problem) from None
    return steps


def _step(
    rank: int, block: _Element, step: _Element, place: str, world: int, buffers: Buffers
) -> Step:
    kind = step.text("type")
    if kind not in _TYPES:
        raise PlanError(f"type {kind!r} is not one of {', '.join(_TYPES)}")
    does = _TYPES[kind].split()
    count = step.number("cnt", 1)
    if does and not 1 <= count <= MOST_CHUNKS:
        raise PlanError(f"cnt={count}: it is a number of chunks")
    after: tuple[tuple[Block, int], ...] = ()
    if step.number("depid", -1) >= 0:
        after = (((rank, step.number("depid")), step.number("deps")),)

    def slots(side: str) -> tuple[Slot, ...]:
        return buffers.slots(rank, step.text(f"{side}buf"), step.number(f"{side}off"), count)

    def peer(way: str) -> int:
        found = block.number(way)
        if not 0 <= found < world or found == rank:
            raise PlanError(f"type {kind!r}, and its thread block has {way}={found}")
        return found

    none: list[tuple[Slot, ...]] = [()] * (count if does else 0)
    read = [(slot,) for slot in slots("src")] if "read" in does else none
    written = [(slot,) for slot in slots("dst")] if "write" in does else none
    sums = [
        Sum(source + (target if "add" in does else ()), target)
        for source, target in zip(read, written, strict=True)
    ]
    channel = block.number("chan", 0)
    return Step(
        place,
        tuple(sums),
        receives=_queue(peer("recv"), rank, channel) if "receive" in does else None,
        sends=_queue(rank, peer("send"), channel) if "send" in does else None,
        after=after,
    )


def _queue(source: int, target: int, channel: int) -> Queue:
    return ("of gpu {} to gpu {} over channel {}", source, target, channel)


def _tree(path: Path) -> _Element:
    """The elements with their lines."""
    parser = expat.ParserCreate()
    inside: list[_Element] = []
    roots: list[_Element] = []

    def start(name: str, attributes: dict[str, str]) -> None:
        element = _Element(name, parser.CurrentLineNumber, attributes)
        around = inside[-1].name if inside else ""
        if _INSIDE.get(name) != around:
            where = f"in <{around}>" if around else "at the top, where <algo> belongs"
            raise PlanError(f"line {element.line}: <{name}> {where} is not of an MSCCLang plan")
        (inside[-1].children if inside else roots).append(element)
        inside.append(element)

    def end(_: str) -> None:
        inside.pop()

    parser.StartElementHandler = start
    parser.EndElementHandler = end
    try:
        parser.Parse(path.read_bytes(), True)
    except expat.ExpatError as problem:
        said = expat.ErrorString(problem.code)
        raise PlanError(f"line {problem.lineno}: this is no whole XML ({said})") from None
    return roots[0]
