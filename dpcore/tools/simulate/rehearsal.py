"""Steps with a launch schedule of your own, which hears the same events as in a run.

Each simulated rank has a copy of the schedule and a thread that calls it, so that a schedule may
wait wherever it may wait in a run. Only one thread runs at a time: it hands over to the simulator
whenever its next event lies in the future, or when it waits for a bucket.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from dpcore.base.link import Speed
from dpcore.base.user_code import naming_the_line
from dpcore.errors import Error, Mismatch
from dpcore.tools.simulate.gradients import Gradients
from dpcore.tools.simulate.links import Links
from dpcore.tools.simulate.network import Network, NetworkOperation

STEPS = 20  # a schedule may learn; the last step counts
T = TypeVar("T")


def copies_for(schedule: Any, world: int) -> list[Any]:
    """One for each rank, from a class or an instance."""
    with naming_the_line(f"schedule {_name_of(schedule)!r}"):
        if isinstance(schedule, type):
            return [schedule() for _ in range(world)]
        return [copy.deepcopy(schedule) for _ in range(world)]


def _name_of(schedule: Any) -> str:
    return (schedule if isinstance(schedule, type) else type(schedule)).__name__


def rehearse(
    work: Gradients,
    buckets: Sequence[Sequence[int]],
    schedules: Sequence[Any],
    link: Speed | Links,
    algorithm: str,
    steps: int = STEPS,
) -> list[float]:
    """Runs some steps one after the other: when each rank is through with the last one, in seconds
    after the begin of its forward. ``schedules``: one for each rank."""
    for _ in range(steps):
        step = _Step(work, buckets, Network(work.world, link, algorithm))
        ranks = [_Rank(rank, step, schedule) for rank, schedule in enumerate(schedules)]
        try:
            for rank in ranks:
                step.network.at(0.0, rank.resume)
            step.network.go_on()
            _check_over(ranks)
        finally:
            for rank in ranks:
                rank.end()
    return [rank.over_at for rank in ranks]


def _check_over(ranks: Sequence[_Rank]) -> None:
    for rank in ranks:
        if rank.over_at < 0:
            raise Error(
                f"rank {rank.rank} of the simulation waits for ever: {rank.waiting_for}; "
                "another rank never sends it"
            )


class _Step:
    """What the ranks of a step have in common: the n-th launch is the same operation on each."""

    def __init__(self, work: Gradients, buckets: Sequence[Sequence[int]], network: Network) -> None:
        self.work = work
        self.buckets = buckets
        self.bytes = [sum(work.sizes[gradient] for gradient in bucket) for bucket in buckets]
        self.network = network
        self._sent: list[tuple[tuple[int, ...], NetworkOperation]] = []
        self._meeting = _Meeting()

    def operation(self, number: int, numbers: tuple[int, ...], priority: int) -> NetworkOperation:
        if number == len(self._sent):
            nbytes = sum(self.bytes[bucket] for bucket in numbers)
            self._sent.append((numbers, NetworkOperation(nbytes, [], priority)))
        others, operation = self._sent[number]
        if others != numbers:
            raise Mismatch(
                f"launch {number} of the step: one rank sends buckets {list(others)}, another one "
                f"{list(numbers)}; ranks have to send the same buckets together"
            )
        return operation

    @property
    def meeting(self) -> _Meeting:
        """The next exchange of values that a rank takes part in."""
        if len(self._meeting.values) == self.work.world:
            self._meeting = _Meeting()
        return self._meeting


@dataclass
class _Meeting:
    """The values of the ranks that have come, and the operation that exchanges them."""

    values: list[list[float]] = field(default_factory=list)
    operation: NetworkOperation = field(default_factory=lambda: NetworkOperation(64, []))


class _Ended(BaseException):
    """The simulation is over, though this rank is not."""


class _Rank:
    """A rank's step, on a thread of its own. It is the ``LaunchControl`` of its schedule."""

    def __init__(self, rank: int, step: _Step, schedule: Any) -> None:
        self.rank = rank
        self.over_at = -1.0
        self.waiting_for = "nothing"
        self._step = step
        self._schedule = schedule
        with naming_the_line(f"schedule {_name_of(schedule)!r}"):
            self._listens = frozenset(schedule.listens_to())
            self._order = list(schedule.order(len(step.buckets)))
            if sorted(self._order) != list(range(len(step.buckets))):
                raise self._error(
                    f"has an order() without each of {len(step.buckets)} buckets once"
                )
        self._missing = [len(bucket) for bucket in step.buckets]
        self._bucket_of = {g: b for b, bucket in enumerate(step.buckets) for g in bucket}
        self._requested: dict[int, tuple[tuple[int, ...], int, bool]] = {}
        self._launched: dict[int, NetworkOperation] = {}  # by bucket
        self._undriven: list[NetworkOperation] = []  # until this rank waits
        self._skipped: set[int] = set()
        self._complete: set[int] = set()
        self._sent = 0  # operations
        self._next = 0  # index in the order
        self._now = 0.0
        self._first_gradient = 0.0
        self._stalled = 0.0  # backward stood still in waits
        self._problem: BaseException | None = None
        self._ended = False
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    # -- turns ---------------------------------------------------------------------------------

    def resume(self, now: float) -> None:
        """Lets the rank go on until it waits for a moment or an operation."""
        self._now = now
        self._turn.release()
        self._back.acquire()
        if self._problem is not None:
            raise self._problem

    def end(self) -> None:
        if self._thread.is_alive():
            self._ended = True
            self._turn.release()
            self._thread.join()

    def _run(self) -> None:
        self._turn.acquire()
        try:
            if not self._ended:
                self._go()
        except _Ended:
            return
        except BaseException as problem:
            self._problem = problem
        self._back.release()

    def _pause(self) -> None:
        self._back.release()
        self._turn.acquire()
        if self._ended:
            raise _Ended

    def _sleep_until(self, moment: float) -> None:
        if moment > self._now:
            self._step.network.at(moment, self.resume)
            self._pause()

    # -- the step ------------------------------------------------------------------------------

    def _go(self) -> None:
        work = self._step.work
        begin = work.forward[self.rank]
        ready = work.ready[self.rank]
        for gradient in sorted(range(len(ready)), key=ready.__getitem__):
            self._sleep_until(begin + ready[gradient] + self._stalled)
            self._stalls(self._gradient, gradient)
        self._sleep_until(begin + work.backward[self.rank] + self._stalled)
        self._tell("backward_end")
        if self._next < len(self._order):
            raise self._error(
                f"has not launched bucket {self._order[self._next]} by the end of backward; "
                "launch or skip every bucket"
            )
        self._tell("optimizer_step")
        self.wait_for_all()
        self.over_at = self._now

    def _stalls(self, work: Callable[[T], None], argument: T) -> None:
        begin = self._now
        work(argument)
        self._stalled += self._now - begin

    def _gradient(self, gradient: int) -> None:
        if sum(self._missing) == sum(map(len, self._step.buckets)):
            self._first_gradient = self._now
        bucket = self._bucket_of[gradient]
        self._missing[bucket] -= 1
        if "bucket_complete" in self._listens:
            for number, operation in list(self._launched.items()):
                if number not in self._complete and operation.is_finished(self.rank):
                    self.wait(number)
        self._tell("gradient_ready", gradient)
        if self._missing[bucket] == 0:
            self._tell("bucket_ready", bucket)

    def _tell(self, event: str, *arguments: int) -> None:
        if event in self._listens:
            with naming_the_line(f"schedule {_name_of(self._schedule)!r} in {event}"):
                getattr(self._schedule, event)(self, *arguments)

    def _error(self, what: str) -> Error:
        return Error(f"schedule {_name_of(self._schedule)!r} {what}")

    # -- LaunchControl -------------------------------------------------------------------------

    @property
    def buckets(self) -> int:
        return len(self._step.buckets)

    @property
    def in_flight(self) -> int:
        return sum(
            not operation.is_finished(self.rank)
            for operation in {id(o): o for o in self._launched.values()}.values()
        )

    @property
    def elapsed_ms(self) -> float:
        return (self._now - self._first_gradient) * 1e3

    def max_over_ranks(self, values: Sequence[float]) -> list[float]:
        meeting = self._step.meeting
        meeting.values.append(list(values))
        self._step.network.launch(meeting.operation, self.rank, self._now)
        self._wait_for(meeting.operation, "max_over_ranks()")
        return [max(each) for each in zip(*meeting.values, strict=True)]

    def bytes(self, bucket: int) -> int:
        return self._step.bytes[bucket]

    def is_complete(self, bucket: int) -> bool:
        return self._missing[bucket] == 0

    def bucket_of(self, gradient: int) -> int | None:
        return self._bucket_of[gradient]

    def gradients_of_module(self, module: int) -> list[int]:
        raise self._error("asks for the gradients of a module, which a trace does not tell")

    def launch(
        self, bucket: int | Sequence[int], priority: int = 0, background: bool = True
    ) -> None:
        numbers = (bucket,) if isinstance(bucket, int) else tuple(bucket)
        if not numbers or numbers != tuple(range(numbers[0], numbers[0] + len(numbers))):
            raise self._error(f"launches {list(numbers)} as one; only neighbours can go together")
        for number in numbers:
            if self._missing[number]:
                raise self._error(
                    f"launches bucket {number}, of which {self._missing[number]} gradients are "
                    "missing; launch it after bucket_ready, or ask is_complete()"
                )
        begin = min(map(self._order.index, numbers))
        if set(self._order[begin : begin + len(numbers)]) != set(numbers):
            raise self._error(f"launches {list(numbers)} as one; in order() others come between")
        known = [number in self._requested or number in self._skipped for number in numbers]
        if any(known) and not all(known):
            raise self._error(f"launches {list(numbers)} as one, of which some are launched")
        if not any(known):
            self._requested.update(dict.fromkeys(numbers, (numbers, priority, background)))
            self._launch_in_order()

    def skip(self, bucket: int) -> None:
        self._skipped.add(bucket)
        self._complete.add(bucket)
        self._launch_in_order()

    def wait(self, bucket: int) -> None:
        if bucket in self._complete:
            return
        if bucket not in self._launched:
            raise self._error(f"waits for bucket {bucket}, which is not launched")
        for operation in self._undriven:
            self._step.network.launch(operation, self.rank, self._now)
        self._undriven.clear()
        self._wait_for(self._launched[bucket], f"bucket {bucket}")
        together = self._requested[bucket][0]
        self._complete.update(together)
        for number in together:
            self._tell("bucket_complete", number)

    def _wait_for(self, operation: NetworkOperation, name: str) -> None:
        if not operation.is_finished(self.rank):
            self.waiting_for = name
            operation.when_finished(self.rank, self.resume)
            self._pause()

    def wait_for_all(self) -> None:
        for bucket in self._order:
            self.wait(bucket)

    def _launch_in_order(self) -> None:
        while self._next < len(self._order):
            bucket = self._order[self._next]
            if bucket in self._requested:
                numbers, priority, background = self._requested[bucket]
                operation = self._step.operation(self._sent, numbers, priority)
                self._sent += 1
                self._next += len(numbers)
                self._launched.update(dict.fromkeys(numbers, operation))
                if background:
                    self._step.network.launch(operation, self.rank, self._now)
                else:
                    self._undriven.append(operation)
            elif bucket in self._skipped:
                self._next += 1
            else:
                return
