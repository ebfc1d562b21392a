"""Chakra's execution traces: a schedule as a graph for each rank, and graphs read back.

A trace is a file of protobuf messages, each behind its length: first what the file is about, then
its nodes. Sends and receives are nodes, and so is each addition; a node waits for the nodes that it
depends on. ASTRA-sim takes such files as a custom collective, one for each rank. Traces of whole
programs have collectives as nodes, and computing nodes that say how long they take. The few fields
that this takes are written and read here, so that it needs no library.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from dpcore.reference.moves import Schedule
from dpcore.reference.plans.blocks import PlanError

SCHEMA = "1.0.2-chakra.0.0.4"
COMPUTE, SEND, RECEIVE, COLLECTIVE = 4, 5, 6, 7  # types of nodes
COLLECTIVES = (
    "all_reduce", "reduce", "all_gather", "gather", "scatter", "broadcast", "all_to_all",
    "reduce_scatter", "reduce_scatter_block", "barrier",
)  # fmt: skip
_KINDS = {1: "metadata", 2: "loads", 3: "stores", COMPUTE: "computing", SEND: "sends",
          RECEIVE: "receives", COLLECTIVE: "collectives"}  # fmt: skip
_VERSION = "0.0.4"  # of the schema
_ID, _NAME, _TYPE, _CONTROL, _DATA, _MICROS, _ATTRIBUTE = 1, 2, 3, 4, 5, 7, 10  # fields of a node
_INT32, _INT64, _STRING = 7, 9, 29  # fields of an attribute
_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5  # how a field is written


@dataclass(frozen=True)
class Node:
    number: int
    name: str
    kind: int
    after: tuple[int, ...] = ()
    attributes: dict[str, int] = field(default_factory=dict)
    micros: int = 0  # that it takes, as its file says

    @property
    def collective(self) -> str:
        """Its name, of a node that is one."""
        number = self.attributes.get("comm_type", 0)
        return COLLECTIVES[number] if number < len(COLLECTIVES) else f"collective {number}"


def nodes_of(schedule: Schedule, rank: int, nbytes: int) -> list[Node]:
    """What a rank does in a collective of so many bytes."""
    made: dict[int, int] = {}  # the node that made the rank's copy of a chunk
    nodes: list[Node] = []

    def add(name: str, kind: int, after: Iterable[int | None], **attributes: int) -> int:
        known = tuple(one for one in after if one is not None)
        nodes.append(Node(len(nodes), name, kind, known, attributes))
        return len(nodes) - 1

    numbered = enumerate(schedule.moves)
    for step, moves in groupby(numbered, key=lambda one: one[1].step):
        arrived: dict[int, list[int]] = {}
        adds: set[int] = set()
        for tag, move in moves:
            size = _bytes_of(schedule, move.chunk, nbytes)
            what = f"step {step} chunk {move.chunk}"
            if move.src == rank:
                add(
                    f"{what} to {move.dst}", SEND, [made.get(move.chunk)],
                    comm_type=SEND, comm_size=size, comm_dst=move.dst, comm_tag=tag,
                )  # fmt: skip
            if move.dst == rank:
                number = add(
                    f"{what} from {move.src}", RECEIVE, [],
                    comm_type=RECEIVE, comm_size=size, comm_src=move.src, comm_tag=tag,
                )  # fmt: skip
                arrived.setdefault(move.chunk, []).append(number)
                adds |= {move.chunk} if move.reduce else set()
        for chunk, received in arrived.items():  # a step reads before it writes
            if chunk in adds:
                before = [made.get(chunk), *received]
                received = [add(f"step {step} chunk {chunk} added", COMPUTE, before)]
            made[chunk] = received[0]
    return nodes


def write(schedule: Schedule, nbytes: int, folder: Path) -> list[Path]:
    """A file for each rank, ``NAME.RANK.et``; ASTRA-sim's custom collective is folder/NAME."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for rank in range(schedule.world):
        path = folder / f"{schedule.collective}_{schedule.algorithm}.{rank}.et"
        write_nodes(nodes_of(schedule, rank, nbytes), path)
        written.append(path)
    return written


def write_nodes(nodes: Sequence[Node], path: Path) -> None:
    messages = [_field(2, _text("schema", SCHEMA)), *map(_of_node, nodes)]
    path.write_bytes(b"".join(_varint(len(one)) + one for one in messages))


def read(path: Path) -> list[Node]:
    """The nodes of a trace; each must depend on known ones, and on none that waits for it."""
    try:
        content = path.read_bytes()
    except OSError as problem:
        raise PlanError(f"{path}: {problem.strerror}") from None
    nodes: list[Node] = []
    at, is_head = 0, True
    while at < len(content):
        try:
            size, first = _read_varint(content, at)
            message = content[first : first + size]
            if len(message) < size:
                raise ValueError
            if is_head:
                _check_version(message, path)
            else:
                nodes.append(_node(message))
        except PlanError:
            raise
        except (IndexError, UnicodeDecodeError, ValueError):
            raise PlanError(
                f"{path} is no trace of Chakra, or was cut off, from byte {at} on"
            ) from None
        at, is_head = first + size, False
    if not nodes:
        raise PlanError(f"{path} has no nodes")
    check(nodes, str(path))
    return nodes


def _check_version(head: bytes, path: Path) -> None:
    said = []
    for key, value in _fields(head):
        if key == 1 and isinstance(value, bytes):
            said.append(value.decode())
        elif key == 2 and isinstance(value, bytes):
            attribute = dict(_fields(value))
            text = attribute.get(_STRING, b"")
            if attribute.get(1) == b"schema" and isinstance(text, bytes):
                said.append(text.decode())
    for version in filter(None, said):
        if not version.endswith(_VERSION):
            raise PlanError(
                f"{path}, first message: the schema is {version}, and {_VERSION} is read, such as "
                f"{SCHEMA}"
            )


def in_words(nodes: Sequence[Node]) -> str:
    """What a trace has, a line each: its nodes, its collectives, and how long they say they take.

    >>> print(in_words([Node(0, "mm", COMPUTE, micros=5),
    ...                 Node(1, "sum", COLLECTIVE, (0,), {"comm_size": 8})]))
    2 nodes: 1 computing, 1 collectives
    1 all_reduce of 8 bytes together
    5 us of computing, of which the longest chain has 5 us
    """
    kinds = Counter(node.kind for node in nodes)
    counted = ", ".join(f"{n} {_KINDS.get(kind, f'of type {kind}')}" for kind, n in kinds.items())
    lines = [f"{len(nodes)} nodes: {counted}"]
    sizes: dict[str, list[int]] = {}
    for node in nodes:
        if node.kind == COLLECTIVE:
            sizes.setdefault(node.collective, []).append(node.attributes.get("comm_size", 0))
    lines += [f"{len(of)} {name} of {sum(of)} bytes together" for name, of in sizes.items()]
    known = {node.number: node for node in nodes}
    ends: dict[int, int] = {}
    left = [node.number for node in nodes]
    while left:
        node = known[left[-1]]
        if missing := [one for one in node.after if one not in ends]:
            left += missing
            continue
        spent = node.micros if node.kind == COMPUTE else 0
        ends[node.number] = max((ends[one] for one in node.after), default=0) + spent
        left.pop()
    total = sum(node.micros for node in nodes if node.kind == COMPUTE)
    lines.append(f"{total} us of computing, of which the longest chain has {max(ends.values())} us")
    return "\n".join(lines)


def check(nodes: Sequence[Node], path: str) -> None:
    """Raises PlanError for a node that can never begin."""
    known = {node.number: node for node in nodes}
    for node in nodes:
        if missing := [one for one in node.after if one not in known]:
            raise PlanError(
                f"{path}, node {node.number} ({node.name}) depends on node {missing[0]}, which "
                "does not exist"
            )
    left = {node.number: set(node.after) for node in nodes}
    followers: dict[int, list[int]] = {}
    for node in nodes:
        for one in set(node.after):
            followers.setdefault(one, []).append(node.number)
    free = [number for number, after in left.items() if not after]
    while free:
        done = free.pop()
        del left[done]
        for number in followers.get(done, ()):
            left[number].discard(done)
            if not left[number]:
                free.append(number)
    if left:
        circle = [min(left)]
        while (later := min(one for one in left[circle[-1]] if one in left)) not in circle:
            circle.append(later)
        names = [f"{n} ({known[n].name})" for n in circle[circle.index(later) :]]
        shown = names if len(names) <= 4 else [*names[:3], f"{len(names) - 3} more"]
        raise PlanError(f"{path}, nodes depend on each other in a circle: {', '.join(shown)}")


def _bytes_of(schedule: Schedule, chunk: int, nbytes: int) -> int:
    """All chunks together, of a rank where a collective is all to all."""
    parts = schedule.world if schedule.collective == "all_to_all" else schedule.chunks
    return nbytes // parts + (chunk % parts < nbytes % parts)


# ---- protobuf: a field is its number and how it is written, then its value


def _varint(number: int) -> bytes:
    digits = bytearray()
    while number > 127:
        digits.append(number & 127 | 128)
        number >>= 7
    return bytes([*digits, number])


def _field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3 | _VARINT) + _varint(value)
    return _varint(number << 3 | _BYTES) + _varint(len(value)) + value


def _text(name: str, value: str) -> bytes:
    return _field(1, name.encode()) + _field(_STRING, value.encode())


def _of_node(node: Node) -> bytes:
    message = _field(_ID, node.number) + _field(_NAME, node.name.encode())
    message += _field(_TYPE, node.kind)
    if node.micros:
        message += _field(_MICROS, node.micros)
    if node.after:
        message += _field(_DATA, b"".join(map(_varint, node.after)))
    for name, value in node.attributes.items():
        wide = name in ("comm_size", "comm_type")
        attribute = _field(1, name.encode()) + _field(_INT64 if wide else _INT32, value)
        message += _field(_ATTRIBUTE, attribute)
    return message


def _read_varint(content: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while content[at] > 127:
        number |= (content[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if shift > 63:
            raise ValueError
    return number | content[at] << shift, at + 1


def _fields(content: bytes) -> Iterator[tuple[int, int | bytes]]:
    at = 0
    while at < len(content):
        key, at = _read_varint(content, at)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, at = _read_varint(content, at)
            yield number, value
            continue
        size = {_EIGHT: 8, _FOUR: 4}.get(kind, -1)
        if kind == _BYTES:
            size, at = _read_varint(content, at)
        if size < 0 or at + size > len(content):
            raise ValueError
        yield number, content[at : at + size]
        at += size


def _node(content: bytes) -> Node:
    number = kind = micros = 0
    name = ""
    after: list[int] = []
    attributes: dict[str, int] = {}
    for key, value in _fields(content):
        if isinstance(value, int):
            if key == _ID:
                number = value
            elif key == _TYPE:
                kind = value
            elif key == _MICROS:
                micros = value
            elif key in (_CONTROL, _DATA):  # one at a time
                after.append(value)
        elif key == _NAME:
            name = value.decode()
        elif key in (_CONTROL, _DATA):
            at = 0
            while at < len(value):
                one, at = _read_varint(value, at)
                after.append(one)
        elif key == _ATTRIBUTE:
            found = dict(_fields(value))
            called = found.get(1, b"")
            numbers = [one for one in found.values() if isinstance(one, int)]
            if isinstance(called, bytes) and numbers:
                attributes[called.decode()] = numbers[0]
    return Node(number, name, kind, tuple(after), attributes, micros)
