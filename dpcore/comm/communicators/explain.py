"""Why a communicator runs the algorithm that it runs: what ``comm.explain(nbytes)`` returns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dpcore.base.markup import paragraphs, table
from dpcore.comm.communicators.costs import Costs

if TYPE_CHECKING:
    from dpcore import _C


@dataclass(frozen=True)
class Candidate:
    """An algorithm, and what the cost model expects of it."""

    algorithm: str
    seconds: float
    steps: int
    network_bytes: float  # through the NIC of the busiest host, in the busier direction
    ordered: bool  # the same bits as within a host, however buffers are cut
    allowed: bool  # by deterministic=True


@dataclass(frozen=True)
class Choice:
    """What runs for one collective, and why. ``candidates``: the fastest first."""

    collective: str
    algorithm: str
    why: str
    candidates: tuple[Candidate, ...]

    def __str__(self) -> str:
        lines = [f"{self.collective}: {self.algorithm}, {self.why}"]
        for one in self.candidates:
            notes = [] if one.ordered else ["not ordered"]
            notes += [] if one.allowed else ["refused by deterministic=True"]
            lines.append(
                f"  {one.algorithm:<20} {one.seconds * 1e6:>11.1f} us  {one.steps:>3} steps  "
                f"{one.network_bytes / 1e6:>10.3f} MB per host"
                + (f"  ({', '.join(notes)})" if notes else "")
            )
        return "\n".join(lines)


@dataclass(frozen=True)
class Explanation:
    """What would run for ``nbytes``: all ranks' parts together, where there is one per rank."""

    nbytes: int
    transport: str
    hosts: tuple[int, ...]
    costs: Costs
    choices: tuple[Choice, ...]

    def __getitem__(self, collective: str) -> Choice:
        for choice in self.choices:
            if choice.collective == collective:
                return choice
        raise KeyError(collective)

    def __iter__(self) -> Iterator[Choice]:
        return iter(self.choices)

    def _repr_html_(self) -> str:
        """For notebooks. The first candidate of each collective is expected to be the fastest."""
        rows = [
            [
                choice.collective if number == 0 else "",
                one.algorithm + (" (runs)" if one.algorithm == choice.algorithm else ""),
                f"{one.seconds * 1e6:.1f}",
                str(one.steps),
                f"{one.network_bytes / 1e6:.3f}",
                "yes" if one.ordered else "no",
                choice.why if number == 0 else "",
            ]
            for choice in self
            for number, one in enumerate(choice.candidates or (_nothing(choice),))
        ]
        columns = ["collective", "algorithm", "us", "steps", "MB per host", "ordered", "why"]
        head = str(self).splitlines()[:4]
        return table(columns, rows, head[0]) + paragraphs(head[1:])

    def __repr__(self) -> str:
        """The table: what an interpreter and a notebook of text show."""
        memory, network = self.costs.memory, self.costs.network
        head = [
            f"{self.nbytes} bytes, {len(self.hosts)} ranks on {len(set(self.hosts))} "
            f"{'host' if len(set(self.hosts)) == 1 else 'hosts'}, transport {self.transport}",
            f"costs: {self.costs.source}",
        ]
        for name, way in (("memory", memory), ("network", network)):
            rate = 1e-9 / way.byte if way.byte > 0 else float("inf")
            head.append(
                f"  {name:<8} {way.step * 1e6:.1f} us a step, {way.message * 1e6:.1f} us a "
                f"message, {rate:.2f} GB/s"
            )
        return "\n".join([*head, *map(str, self.choices)])


def _nothing(choice: Choice) -> Candidate:
    """Stands in where no candidate was priced."""
    return Candidate(choice.algorithm, 0.0, 0, 0.0, True, True)


def explain(native: _C.Communicator, nbytes: int, source: str) -> Explanation:
    """Asks the compiled core, which would choose in the same way in an operation."""
    from dpcore import _C

    names = [name for name, *_ in _C.collectives() if name != "barrier"]
    return Explanation(
        nbytes=nbytes,
        transport=native.transport,
        hosts=tuple(native.hosts),
        costs=Costs.of_list(native.costs, source),
        choices=tuple(_choice(name, native.explain(name, nbytes)) for name in names),
    )


def _choice(collective: str, found: dict[str, Any]) -> Choice:
    candidates = sorted((Candidate(**entry) for entry in found["candidates"]), key=_seconds)
    algorithm, why = _reason(found, candidates)
    return Choice(collective, algorithm, why, tuple(candidates))


def _reason(found: dict[str, Any], candidates: list[Candidate]) -> tuple[str, str]:
    chosen = found["algorithm"]
    match found["way"]:
        case "alone":
            return "none", "there is no other rank"
        case "entry":
            return "entry", "so few bytes travel in the frame that announces entry, one each way"
        case "memory" if not found["asked"]:
            return "memory", "all ranks share memory: paths without messages, see stats()"
    if found["asked"]:
        own = "a schedule of the program's own, " if found["is_own"] else ""
        return chosen, f"{own}asked for by algorithm= or DPCORE_ALGORITHM"
    best = candidates[0]
    if best.algorithm == chosen:
        return chosen, "expected to be the fastest"
    if not best.allowed:
        return chosen, f"the fastest that deterministic=True allows ({best.algorithm} is not)"
    return chosen, (
        f"ordered: the same bits as within a host; {best.algorithm} is not enough faster to be "
        "worth other bits"
    )


def _seconds(candidate: Candidate) -> float:
    return candidate.seconds
