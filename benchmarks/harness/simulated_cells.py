"""The cells of `benchmarks.simulated`, what is predicted of each from its record, and by how much
that is off."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dpcore.base.link import Speed, parse_speed
from dpcore.tools.compare.training.ranks import kind_and_cap
from dpcore.tools.hosts import burst_bytes
from dpcore.tools.simulate import Gradients, predict
from dpcore.tools.simulate.command import named_or_own
from dpcore.tools.simulate.links import Links
from dpcore.tools.simulate.local_updates import LocalUpdates
from dpcore.tools.simulate.processors import Processors

ORACLE = "dpcore oracle"
MOST_DIFFERENCE = 0.02  # between the halves of a cell that counts
VETH_LATENCY = 20e-6  # between network namespaces
OWN = "dpcore examples/launch_schedules.py:Window 1"

WITHIN = ("dpcore sequential 1", "dpcore bucketed 1", "dpcore bucketed 4")
ACROSS = ("dpcore priority", "dpcore dear", "dpcore zero1")
CAP_MB = 1.0  # of schedules across steps unless they are told another
LOCAL = "local 4"  # LocalSGD
TORCH = "torch 4"  # torch DDP over Gloo, predicted from its own profile
ALL = (*WITHIN, *ACROSS, OWN, LOCAL)


@dataclass(frozen=True)
class Column:
    """``place``: "host", a link that is emulated, or "shaped RATE"."""

    place: str
    world: int
    model: str
    contenders: Sequence[str] = ALL

    @property
    def is_host(self) -> bool:
        return self.place == "host"

    @property
    def shaped_rate(self) -> str:
        return self.place.removeprefix("shaped ") if self.place.startswith("shaped ") else ""


COLUMNS = (
    Column("1gbit,50us", 2, "sleeping"),
    Column("1gbit,50us", 2, "sleeping_short"),
    Column("1gbit,50us", 2, "resnet18_shapes"),
    Column("1gbit,50us", 2, "transformer"),
    Column("3gbit,30us", 2, "transformer"),
    Column("10gbit,20us", 2, "resnet18_shapes"),
    Column("10gbit,20us", 2, "transformer"),
    Column("10gbit,20us", 2, "mlp", (*WITHIN, LOCAL)),
    Column("100mbit,100us", 2, "sleeping_light"),
    Column("1gbit,50us", 4, "sleeping"),
    Column("250mbit,50us", 4, "sleeping_light"),
    Column("250mbit,50us", 8, "sleeping_light"),
    Column("shaped 1gbit", 2, "sleeping", (*ALL, TORCH)),
    Column("shaped 1gbit", 2, "transformer", (*ALL, TORCH)),
    Column("shaped 100mbit", 2, "sleeping_light", (*ALL, TORCH)),
    Column("shaped 1gbit", 4, "sleeping", (*ALL, TORCH)),
    Column("shaped 10gbit", 2, "sleeping", (*ALL, TORCH)),
    Column("shaped 10gbit", 2, "resnet18_shapes", (*ALL, TORCH)),
    Column("shaped 10gbit", 2, "transformer", (*ALL, TORCH)),
    Column("host", 2, "sleeping"),
    Column("host", 2, "transformer"),
    Column("host", 2, "mlp", (*WITHIN, LOCAL)),
    Column("host", 4, "sleeping_light"),
)


@dataclass(frozen=True)
class Cell:
    """Milliseconds of a step, and the prediction divided by what was measured, less 1.
    ``difference``: of the halves of its run, each divided by its own ``oracle``."""

    place: str
    world: int
    model: str
    contender: str
    alone_ms: float
    measured_ms: float
    predicted_ms: float
    difference: float

    @property
    def error(self) -> float:
        return self.predicted_ms / self.measured_ms - 1

    @property
    def counts(self) -> bool:
        return self.difference <= MOST_DIFFERENCE

    @property
    def is_clearly_off(self) -> bool:
        return abs(self.error) > 3 * self.difference

    def __str__(self) -> str:
        return (
            f"{self.contender.removeprefix('dpcore '):42}{self.measured_ms:9.2f} ms, predicted "
            f"{self.predicted_ms:9.2f} ms, {self.error:+7.1%}, halves differ by "
            f"{self.difference:.1%}{'' if self.counts else ': does not count'}"
        )


def judged(record: dict[str, Any]) -> list[Cell]:
    """The cells of a column's record, predicted anew."""
    rounds = record["rounds_s"]
    alone = statistics.median(rounds[ORACLE])
    return [
        Cell(
            record["place"], record["world"], record["model"], name, alone * 1e3,
            statistics.median(times) * 1e3, predicted_seconds(record, name) * 1e3,
            difference_of_halves(times, rounds[ORACLE]),
        )
        for name, times in rounds.items()
        if name != ORACLE
    ]  # fmt: skip


def difference_of_halves(times: Sequence[float], alone: Sequence[float]) -> float:
    """Of the first rounds and the last, as a part of their mean."""
    half = len(times) // 2
    first = statistics.median(times[:half]) / statistics.median(alone[:half])
    last = statistics.median(times[half:]) / statistics.median(alone[half:])
    return abs(first - last) / ((first + last) / 2)


def predicted_seconds(record: dict[str, Any], contender: str) -> float:
    schedule: Any = "bucketed"
    cap = None
    processors = processors_of(record)
    if contender == TORCH:  # what its threads took of the cores is in its profile already
        processors = Processors(processors.cores, processors.ranks)
    elif contender == LOCAL:
        schedule = LocalUpdates(int(LOCAL.rpartition(" ")[2]))
    else:
        kind, told = kind_and_cap(contender)
        schedule = named_or_own(kind.removeprefix("dpcore "))
        cap = told.get("bucket_cap_mb", CAP_MB)
    work = work_of(record, contender)
    made = predict(work, link_of(record), schedule, cap, "auto", processors)
    return made.step_ms * 1e-3


def work_of(record: dict[str, Any], contender: str = ORACLE) -> Gradients:
    """What was recorded of `oracle`, made as fast as its steps were in the measured rounds. What
    torch's profiler wrote of torch DDP goes by the same factor: the copies and hooks within its
    backward are torch's own. How busy a core was is not in it."""
    work = replace(Gradients(**record["work"]), update=record["update_s"])
    computed = max(map(sum, zip(work.forward, work.backward, work.update, strict=True)))
    factor = statistics.median(record["rounds_s"][ORACLE]) / computed
    if contender == TORCH:
        of_torch = Gradients(**record["torch_work"])
        work = replace(of_torch, update=work.update, busy=work.busy)
    work = work.slowed_by([factor] * work.world)
    return work.on_cores_of_their_own(processors_of(record).cores, record["world"])


def link_of(record: dict[str, Any]) -> Speed | Links:
    column = Column(record["place"], record["world"], record["model"])
    if column.is_host:
        return Links.memory()
    if rate := column.shaped_rate:
        speed = replace(parse_speed(rate), latency=VETH_LATENCY)
        # benchmarks/harness/shaped.py: connections keep their rate in a pause.
        return Links.tcp(speed, burst=burst_bytes(rate), first_window=0)
    return parse_speed(column.place)


def processors_of(record: dict[str, Any]) -> Processors:
    """Of one machine, wherever its ranks believe to be."""
    return Processors(**record["processors"] | {"ranks": record["world"]})
