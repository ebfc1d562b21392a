"""Proves a plan of thread blocks, and finds the moves that it makes.

All thread blocks run in turns on symbols in the place of numbers: a value is a chunk and the ranks
that contributed to it. One order of steps is enough, because every other one gives the same: for
each slot that two steps touch, one of which writes it, messages, signals and dependencies must put
one before the other. A clock for each thread block, which what it sends carries along, says
whether they do.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dpcore.reference.plans.blocks import Block, BlockPlan, PlanError, Queue, Slot, Step, Sum
from dpcore.reference.plans.versions import Value, Versions

Clock = npt.NDArray[np.int32]  # how many steps of each thread block are known to be done


class Touch(NamedTuple):
    place: str
    block: int  # its number among the clocks
    moment: int


class Held(NamedTuple):
    value: Value
    written: Touch
    clock: Clock


def prove(plan: BlockPlan) -> Versions:
    """Raises PlanError unless the plan is right, however fast each thread block is."""
    run = _Run(plan)
    run.to_the_end()
    run.check_the_end()
    return run.versions


class _Run:
    def __init__(self, plan: BlockPlan) -> None:
        self.plan = plan
        self.versions = Versions(plan.world, reduces="reduce" in plan.collective)
        self.blocks = list(plan.blocks)
        self.number = {block: number for number, block in enumerate(self.blocks)}
        size = len(self.blocks) + plan.world  # a rank's beginning has a clock, too
        self.clocks = [np.zeros(size, np.int32) for _ in self.blocks]
        for block, clock in zip(self.blocks, self.clocks, strict=True):
            clock[len(self.blocks) + block[0]] = 1
        self.done: Counter[Block] = Counter()
        self.messages: defaultdict[Queue, deque[tuple[str, list[Value], Clock]]]
        self.messages = defaultdict(deque)
        self.signals: defaultdict[Queue, deque[Clock]] = defaultdict(deque)
        for queue, count in plan.given.items():
            self.signals[queue].extend(np.zeros(size, np.int32) for _ in range(count))
        self.met: defaultdict[Queue, list[Clock]] = defaultdict(list)
        self.passed: Counter[tuple[Block, Queue]] = Counter()
        self.arrived: set[tuple[Block, int]] = set()
        referred = (one for steps in plan.blocks.values() for step in steps for one in step.after)
        self.kept: dict[tuple[Block, int], Clock | None] = dict.fromkeys(referred)
        self.held: dict[Slot, Held] = {}
        self.read: defaultdict[Slot, list[Touch]] = defaultdict(list)
        for slot, chunk in plan.begins.items():
            begin = Touch("the beginning", len(self.blocks) + slot.rank, 1)
            value = self.versions.contribution(slot.rank, chunk)
            self.held[slot] = Held(value, begin, np.zeros(size, np.int32))

    def to_the_end(self) -> None:
        waiting = [block for block, steps in self.plan.blocks.items() if steps]
        while waiting:
            before = sum(self.done.values())
            waiting = [block for block in waiting if not self.advance(block)]
            if waiting and sum(self.done.values()) == before:
                raise PlanError(self.why_it_hangs(waiting[0]))

    def advance(self, block: Block) -> bool:
        """Does steps until one has to wait; whether the thread block is done."""
        steps = self.plan.blocks[block]
        while self.done[block] < len(steps):
            step = steps[self.done[block]]
            self.arrive(block, step)
            if next(self.lacks(block, step), None) is not None:
                return False
            self.do(block, step)
        return True

    # ---- waiting

    def arrive(self, block: Block, step: Step) -> None:
        if step.meets and (block, self.done[block]) not in self.arrived:
            self.arrived.add((block, self.done[block]))
            self.met[step.meets[0]].append(self.clocks[self.number[block]].copy())

    def lacks(self, block: Block, step: Step) -> Iterator[tuple[str, Any]]:
        """What the step waits for."""
        for one in step.after:
            if self.done[one[0]] <= one[1]:
                yield "step", one
        if step.receives is not None and not self.messages[step.receives]:
            yield "message", step.receives
        for queue, count in Counter(step.waits).items():
            if len(self.signals[queue]) < count:
                yield "signal", queue
        for slot in step.filled:
            if slot not in self.held:
                yield "packet", slot
        if step.meets:
            queue, blocks = step.meets
            if len(self.met[queue]) < (self.passed[block, queue] + 1) * blocks:
                yield "barrier", queue

    def why_it_hangs(self, block: Block) -> str:
        """Follows what waits for what, to a circle or to something that never comes."""
        seen: list[Block] = []
        said: list[str] = []
        while block not in seen:
            seen.append(block)
            step = self.plan.blocks[block][self.done[block]]
            kind, what = next(self.lacks(block, step))
            said.append(f"{step.place} waits for {_awaited(kind, what)}")
            found = self.giver_of(kind, what)
            if found is None:
                return f"{said[-1]}, which never comes"
            block = found
        circle = said[seen.index(block) :]
        shown = circle if len(circle) <= 4 else [*circle[:3], f"... {len(circle) - 3} more"]
        return "thread blocks wait in a circle: " + "; ".join(shown)

    def giver_of(self, kind: str, what: Any) -> Block | None:
        """A thread block that would still give it."""
        if kind == "step":
            (block, number) = what
            return block if number < len(self.plan.blocks.get(block, ())) else None
        for block, steps in self.plan.blocks.items():
            for number in range(self.done[block], len(steps)):
                step = steps[number]
                if (
                    (kind == "message" and step.sends == what)
                    or (kind == "signal" and what in step.signals)
                    or (kind == "packet" and any(what in one.targets for one in step.sums))
                    or (
                        kind == "barrier"
                        and step.meets
                        and step.meets[0] == what
                        and (block, number) not in self.arrived
                    )
                ):
                    return block
        return None

    # ---- doing

    def do(self, block: Block, step: Step) -> None:
        number = self.number[block]
        clock = self.clocks[number]
        for known in self.known_by_waiting(block, step):
            np.maximum(clock, known, out=clock)
        clock[number] += 1
        touch = Touch(step.place, number, int(clock[number]))
        received: list[Value] = []
        if step.receives is not None:
            sender, received, known = self.messages[step.receives].popleft()
            np.maximum(clock, known, out=clock)
            if len(received) != len(step.sums):
                raise PlanError(
                    f"{step.place} receives {len(step.sums)} chunks, and {sender} sends "
                    f"{len(received)}"
                )
        results = [
            self.result(step, one, touch, clock, received[i : i + 1])
            for i, one in enumerate(step.sums)
        ]
        known = clock.copy()
        for one, result in zip(step.sums, results, strict=True):
            for slot in one.targets:
                self.write(slot, result, touch, clock, known, block[0])
        if step.sends is not None:
            sent = [self.versions.at(block[0], result, step.place) for result in results]
            self.messages[step.sends].append((step.place, sent, known))
        for queue in step.signals:
            self.signals[queue].append(known)
        if (block, self.done[block]) in self.kept:
            self.kept[block, self.done[block]] = known
        self.done[block] += 1

    def known_by_waiting(self, block: Block, step: Step) -> Iterable[Clock]:
        for one in step.after:
            kept = self.kept[one]
            if kept is not None:
                yield kept
        for queue in step.waits:
            yield self.signals[queue].popleft()
        for slot in step.filled:
            yield self.held[slot].clock
        if step.meets:
            queue, blocks = step.meets
            first = self.passed[block, queue] * blocks
            yield from self.met[queue][first : first + blocks]
            self.passed[block, queue] += 1

    def result(
        self, step: Step, one: Sum, touch: Touch, clock: Clock, received: list[Value]
    ) -> Value:
        rank = self.blocks[touch.block][0]
        values = [*received]
        for slot in one.sources:
            if slot not in self.held:
                raise PlanError(f"{step.place} reads {slot}, which holds nothing yet")
            held = self.held[slot]
            self.check_order(held.written, touch, clock, f"reads {slot}", "writes it")
            self.read[slot].append(touch)
            value = held.value
            if slot.rank != rank:
                value = self.versions.at(slot.rank, value, step.place)
            values.append(value)
        if not values:
            raise PlanError(f"{step.place} adds nothing")
        result = values[0]
        for value in values[1:]:
            result = self.added(result, value, step.place)
        return result

    def added(self, one: Value, other: Value, place: str) -> Value:
        if one.chunk != other.chunk:
            raise PlanError(f"{place} adds chunk {other.chunk} to chunk {one.chunk}")
        if not self.versions.reduces:
            raise PlanError(
                f"{place} adds to chunk {one.chunk}, and {self.plan.collective} only moves"
            )
        if twice := sorted(one.ranks & other.ranks):
            raise PlanError(
                f"{place} adds the contribution of gpu {twice[0]} to chunk {one.chunk} a second "
                "time"
            )
        return Value(one.chunk, one.parts | other.parts, one.ranks | other.ranks)

    def write(
        self, slot: Slot, value: Value, touch: Touch, clock: Clock, known: Clock, rank: int
    ) -> None:
        if slot in self.held:
            self.check_order(self.held[slot].written, touch, clock, f"writes {slot}", "writes it")
        for reader in self.read.pop(slot, ()):
            self.check_order(reader, touch, clock, f"writes {slot}", "reads it")
        if slot.rank != rank:
            value = self.versions.at(rank, value, touch.place)
        self.held[slot] = Held(value, touch, known)

    def check_order(self, first: Touch, second: Touch, clock: Clock, does: str, did: str) -> None:
        if clock[first.block] < first.moment:
            raise PlanError(
                f"{second.place} {does}, and nothing puts it after {first.place}, which {did}"
            )

    # ---- the end

    def check_the_end(self) -> None:
        for queue, left in self.messages.items():
            if left:
                raise PlanError(
                    f"{left[0][0]} sends {_awaited('message', queue)}, and none receives it"
                )
        for slot, chunk in self.plan.ends.items():
            held = self.held.get(slot)
            if held is None:
                raise PlanError(
                    f"gpu {slot.rank} ends without chunk {chunk}: nothing writes {slot}"
                )
            value = held.value
            if value.chunk != chunk:
                raise PlanError(
                    f"{held.written.place} leaves chunk {value.chunk} in {slot}, where chunk "
                    f"{chunk} belongs"
                )
            if self.versions.reduces and len(value.ranks) < self.plan.world:
                missing = sorted(set(range(self.plan.world)) - value.ranks)
                raise PlanError(
                    f"gpu {slot.rank} ends without a complete chunk {chunk}: the contribution of "
                    f"gpu {missing[0]} is missing in what {held.written.place} left in {slot}"
                )
            self.versions.end_with(slot.rank, value)


def _awaited(kind: str, what: Any) -> str:
    if kind == "step":
        ((rank, block), number) = what
        return f"step {number} of thread block {block} of gpu {rank}"
    if kind == "packet":
        return f"packets in {what}"
    words, *numbers = what
    return f"{'a' if kind != 'barrier' else 'all at a'} {kind} {str(words).format(*numbers)}"
