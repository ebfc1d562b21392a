"""The buckets of a simulated step: the twin of ``csrc/reducer/reducer_launch.cpp``.

``Control`` is what a launch schedule calls: a ``LaunchControl`` as in a run, with the same errors.
A bucket is launched in the common order of the ranks, awaited, and goes through its further phases:
the second half of an all-reduce, the optimizer's update.
``HeardSchedule`` is what a schedule says of itself, and the events that it hears. A schedule that
``DataParallel`` refuses is refused here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from numbers import Integral
from typing import Any, NamedTuple

from dpcore.base.user_code import naming_the_line
from dpcore.ddp.wrapper.launch_schedule import check_methods
from dpcore.errors import Error, Unsupported
from dpcore.tools.simulate.plan import Matching
from dpcore.tools.simulate.turns import Flight, Note, Turns

_PHASES = (
    ["all_reduce"],
    ["all_reduce", "update"],
    ["reduce_scatter", "all_gather", "update"],
    ["reduce_scatter", "update", "all_gather"],
)


def name_of(schedule: Any) -> str:
    return str((schedule if isinstance(schedule, type) else type(schedule)).__name__)


def copies_for(schedule: Any, ranks: int) -> list[Any]:
    """One for each rank, from a class or an object."""
    check_methods(schedule if isinstance(schedule, type) else type(schedule))
    with naming_the_line(f"schedule {name_of(schedule)!r}"):
        if isinstance(schedule, type):
            return [schedule() for _ in range(ranks)]
        return [copy.deepcopy(schedule) for _ in range(ranks)]


def phases_of(schedule: Any) -> list[str]:
    """As csrc/reducer/phases/phases.cpp checks them."""
    in_words = f"schedule {name_of(schedule)!r}"
    with naming_the_line(in_words):
        phases = list(map(str, schedule.phases()))
    if phases not in _PHASES:
        legal = ", ".join(map(_listed, _PHASES))
        raise Unsupported(f"{in_words}: phases {_listed(phases)}: a bucket may have {legal}")
    return phases


def _listed(names: Sequence[str]) -> str:
    return f"[{', '.join(names)}]"


def caps_of(schedule: Any, wanted: Sequence[int]) -> list[int]:
    """Bytes of buckets, of which there is at least one."""
    in_words = f"schedule {name_of(schedule)!r}"
    with naming_the_line(in_words):
        caps = list(schedule.caps(wanted))
    if not caps:
        raise Unsupported(
            f"{in_words}: caps() returns no size of buckets; return at least one, in bytes"
        )
    for cap in caps:
        if not isinstance(cap, Integral) or int(cap) < 0:
            raise Unsupported(
                f"{in_words}: caps() returns {cap!r}; a size of buckets is a whole number of "
                "bytes, from 0 on"
            )
    return list(map(int, caps))


class Slice(NamedTuple):
    """What is launched by itself: bytes ``begin`` to ``end`` of a bucket, or all of them.
    ``number``: in its bucket."""

    bucket: int
    begin: int
    end: int
    number: int = 0


class HeardSchedule:
    """``schedule``: a ``dpcore.LaunchSchedule``, or a twin of ``dpcore.reference.launches``;
    ``sizes``: bytes of each bucket."""

    def __init__(self, schedule: Any, sizes: Sequence[int]) -> None:
        buckets = len(sizes)
        self._schedule = schedule
        self._in_words = f"schedule {name_of(schedule)!r}"
        self.phases = phases_of(schedule)
        with naming_the_line(self._in_words):
            self.listens = frozenset(schedule.listens_to())
            self.whole_buckets = int(schedule.whole_buckets())
            self.is_exact = bool(schedule.is_exact())
            self.order = list(schedule.order(buckets))
            named = [Slice(*each) for each in schedule.slices(list(sizes))]
        if sorted(self.order) != list(range(buckets)):
            raise self.error(f"has an order() without each of {buckets} buckets once")
        self.cuts = bool(named)
        if self.cuts:
            self._check(named, sizes)
        self.slices: list[Slice] = []
        self.slices_of: list[list[int]] = [[] for _ in sizes]
        for each in named or [Slice(bucket, 0, sizes[bucket]) for bucket in self.order]:
            of_bucket = self.slices_of[each.bucket]
            self.slices.append(each._replace(number=len(of_bucket)))
            of_bucket.append(len(self.slices) - 1)

    def _check(self, slices: Sequence[Slice], sizes: Sequence[int]) -> None:
        """As csrc/reducer/launch/slices.cpp does."""
        if self.phases[0] != "all_reduce":
            raise self.error(
                "has slices(), which is for phases that begin with all_reduce; in halves, each "
                "bucket is scattered whole"
            )
        ends = [0] * len(sizes)
        for bucket, of_bucket in groupby(sorted(slices), lambda each: each.bucket):
            if not 0 <= bucket < len(sizes):
                raise self.error(
                    f"names bucket {bucket} in slices(); there are {len(sizes)}, numbered from 0"
                )
            for _, begin, end, _ in of_bucket:
                where = f"bytes {begin} to {end} of bucket {bucket}"
                if not begin < end <= sizes[bucket]:
                    raise self.error(f"has {where} in slices(), which has {sizes[bucket]}")
                if begin < ends[bucket]:
                    raise self.error(
                        f"has {where} in slices(), of which another slice has the bytes up to "
                        f"{ends[bucket]}"
                    )
                if begin > ends[bucket]:
                    break
                ends[bucket] = end
        for bucket, end in enumerate(ends):
            if end < sizes[bucket]:
                raise self.error(
                    f"leaves out bytes of bucket {bucket} in slices(), from byte {end} on"
                )

    @property
    def has_update(self) -> bool:
        return "update" in self.phases

    @property
    def updates_parts(self) -> bool:
        """Each rank steps its part of the parameters, which are gathered."""
        return self.has_update and self.phases[-1] == "all_gather"

    def tell(self, event: str, *arguments: Any) -> None:
        if event in self.listens:
            with naming_the_line(f"{self._in_words} in {event}"):
                getattr(self._schedule, event)(*arguments)

    def error(self, what: str) -> Error:
        return Error(f"{self._in_words} {what}")


_Request = tuple[tuple[int, ...], int, bool, Any]  # buckets, priority, background, algorithm


class Control:
    """Of one rank in one step. ``update_seconds``: what the optimizer takes for all parameters."""

    def __init__(
        self,
        turns: Turns,
        schedule: HeardSchedule,
        matching: Matching,
        number: int,
        update_seconds: float,
    ) -> None:
        self._turns, self._schedule, self._matching = turns, schedule, matching
        self._plan = plan = matching.plan
        self._hook, self._number, self._update_seconds = matching.hook, number, update_seconds
        self._first, *self._later = schedule.phases
        self.missing = [len(bucket) for bucket in plan.buckets]
        self.first_gradient = 0.0  # the moment
        self.backward_ends = self.in_forward = self.has_stepped = False
        self._requested: dict[int, _Request] = {}  # by slice
        self._next = 0  # index in the slices: all before it are launched or skipped
        self._flights: dict[int, tuple[tuple[int, ...], Flight]] = {}  # by slice: first phases
        self._come: set[int] = set()  # slices that are over
        self._gathers: dict[int, Flight] = {}  # by bucket: launched, and nothing has waited
        self._complete: set[int] = set()  # buckets whose first phase is over
        self._at = [0] * len(plan.buckets)  # the phase of each bucket
        self._unfinished = len(plan.buckets)
        self._sent = 0  # operations of this step
        self._undriven: list[Callable[[], None]] = []  # until this rank waits
        self._calls = 0  # of the optimizer

    # ---- what a schedule may ask ---------------------------------------------------------------

    @property
    def rank(self) -> int:
        return self._turns.rank

    @property
    def buckets(self) -> int:
        return len(self._plan.buckets)

    @property
    def in_flight(self) -> int:
        first = {
            id(flight): at in self._come or self._has_come(at)
            for at, (_, flight) in self._flights.items()
        }
        return sum(not over for over in (*first.values(), *map(self.is_over, self._gathers)))

    @property
    def elapsed_ms(self) -> float:
        return (self._turns.now - self.first_gradient) * 1e3

    def bytes(self, bucket: int) -> int:
        return self._plan.bytes[self._known(bucket)]

    def is_complete(self, bucket: int) -> bool:
        return self.missing[self._known(bucket)] == 0

    def bucket_of(self, gradient: int) -> int | None:
        return self._plan.bucket_of[gradient]

    def gradients_of_module(self, module: int) -> list[int]:
        return list(self._plan.modules[module])

    def order_of_need(self) -> list[int]:
        return self._plan.order_of_need

    def next_phase(self, bucket: int) -> str | None:
        at = self._at[self._known(bucket)]
        return self._schedule.phases[at] if at <= len(self._later) else None

    def is_over(self, bucket: int) -> bool:
        if self._known(bucket) in self._gathers:
            return self._gathers[bucket].is_over
        return bucket in self._complete or all(
            at in self._come or self._has_come(at) for at in self._schedule.slices_of[bucket]
        )

    def _has_come(self, at: int) -> bool:
        """A hook's result comes in a wait."""
        return self._hook is None and at in self._flights and self._flights[at][1].is_over

    def slices(self, bucket: int) -> list[int]:
        slices = (self._schedule.slices[at] for at in self._schedule.slices_of[self._known(bucket)])
        return [each.end - each.begin for each in slices]

    def max_over_ranks(self, values: Sequence[float]) -> list[float]:
        turns = self._turns
        exchange = self._matching.exchange(turns.exchanges, values)
        turns.exchanges += 1
        flight = Flight(exchange.operation, self.rank)
        turns.network.launch(exchange.operation, self.rank, turns.now)
        turns.wait_for(flight, "max_over_ranks()")
        return [max(each) for each in zip(*exchange.values, strict=True)]

    # ---- launches ------------------------------------------------------------------------------

    def launch(
        self,
        bucket: int | Sequence[int],
        priority: int = 0,
        background: bool = True,
        algorithm: Any = None,
        slice: int | None = None,
    ) -> None:
        numbers = tuple(map(self._known, (bucket,) if isinstance(bucket, int) else bucket))
        request = numbers, priority, background, algorithm
        if len(numbers) == 1 and (self._at[numbers[0]] > 0 or self._may_follow(numbers[0])):
            self._launch_gather(request)
            return
        self._check_launch(numbers)
        if self._schedule.cuts or slice is not None:
            for at in self._slices_named(numbers[0], slice):
                self._requested.setdefault(at, request)
            self._launch_in_order()
            return
        at_of = {number: self._schedule.slices_of[number][0] for number in numbers}
        known = [at_of[number] in self._requested or number in self._complete for number in numbers]
        if any(known) and not all(known):
            raise self._schedule.error(
                f"launches {list(numbers)} as one, of which some are launched"
            )
        if not any(known):
            self._requested.update(dict.fromkeys(at_of.values(), request))
            self._launch_in_order()

    def _slices_named(self, bucket: int, number: int | None) -> list[int]:
        of_bucket = self._schedule.slices_of[bucket]
        if number is None:
            return of_bucket
        if not 0 <= number < len(of_bucket):
            raise self._schedule.error(
                f"launches slice {number} of bucket {bucket}, which has {len(of_bucket)}, numbered "
                "from 0"
            )
        return [of_bucket[number]]

    def skip(self, bucket: int) -> None:
        if self._schedule.is_exact:
            raise self._schedule.error(
                f"skips bucket {bucket}, whose gradients then stay each rank's own, though its "
                "is_exact() says that gradients are averaged; launch the bucket, or return False "
                "from is_exact()"
            )
        is_requested = any(at in self._requested for at in self._schedule.slices_of[bucket])
        if self._known(bucket) not in self._complete and not is_requested:
            self._complete.add(bucket)
            self._enter(bucket, len(self._later) + 1)
            self._launch_in_order()

    def _check_launch(self, numbers: tuple[int, ...]) -> None:
        def refuse(why: str) -> None:
            raise self._schedule.error(f"launches {list(numbers)} as one; {why}")

        if not numbers or numbers != tuple(range(numbers[0], numbers[0] + len(numbers))):
            refuse("only neighbours can go together")
        for number in numbers:
            if self.missing[number]:
                raise self._schedule.error(
                    f"launches bucket {number}, of which {self.missing[number]} gradients are "
                    "missing; launch it after bucket_ready, or ask is_complete()"
                )
        if len(numbers) > 1 and self._schedule.cuts:
            refuse("the schedule cuts buckets, which then go by themselves")
        order = self._schedule.order
        begin = min(map(order.index, numbers))
        if set(order[begin : begin + len(numbers)]) != set(numbers):
            refuse("in order() others come between")
        if len(numbers) > 1 and self._first == "reduce_scatter":
            refuse("in its phases each bucket is scattered by itself")

    def _launch_in_order(self) -> None:
        slices = self._schedule.slices
        while self._next < len(slices):
            one = slices[self._next]
            if self._next in self._requested:
                self._make_room()
                request = self._requested[self._next]
                if self._hook is not None:
                    request = ((one.bucket,), *request[1:])  # a hook gets each by itself
                    self._turns.compute(self._hook.before * self._plan.bytes[one.bucket])
                part = range(one.begin, one.end) if self._schedule.cuts else None
                flight = self._send(self._first, request, part=part)
                until = self._next + len(request[0])
                self._flights.update(dict.fromkeys(range(self._next, until), (request[0], flight)))
                self._next = until
            elif one.bucket in self._complete:
                self._next += 1
            else:
                return

    def _make_room(self) -> None:
        """A launch waits for the bucket that used its memory before."""
        before = self._next - self._schedule.whole_buckets
        if self._schedule.whole_buckets and before >= 0:
            self.wait(self._schedule.order[before])

    def _first_of(self, bucket: int) -> int:
        return self._schedule.slices_of[bucket][0]

    def _may_follow(self, bucket: int) -> bool:
        is_launched = self._first_of(bucket) in self._flights and bucket not in self._complete
        return self.backward_ends and self._later[:1] == ["all_gather"] and is_launched

    def _launch_gather(self, request: _Request) -> None:
        ((bucket,), *_) = request
        if self.next_phase(bucket) is None or bucket in self._gathers:
            return
        follows = self._may_follow(bucket)
        if not follows and self.next_phase(bucket) != "all_gather":
            raise self._schedule.error(
                f"launches bucket {bucket}, whose next phase is update: call control.update()"
            )
        if self.in_forward:
            raise self._schedule.error(
                f"launches bucket {bucket} in forward_begin, where ranks may differ in the modules "
                "that they run; launch it in bucket_ready, backward_end or optimizer_step"
            )
        after = self._flights[self._first_of(bucket)][1] if follows else None
        self._gathers[bucket] = self._send("all_gather", request, after)

    def _send(
        self,
        collective: str,
        request: _Request,
        after: Flight | None = None,
        part: range | None = None,
    ) -> Flight:
        """``after``: it begins when that is over. ``part``: these bytes of the bucket only."""
        operation = self._matching.operation(self._number, self._sent, collective, *request, part)
        self._sent += 1
        begin = partial(self._turns.network.launch, operation, self.rank)

        def drive() -> None:
            if after is None or after.is_over:
                begin(self._turns.now)
            else:
                after.then(begin)

        flight = Flight(operation, self.rank)
        if self._turns.notes is not None:
            self._note_launch(collective, request[0], flight, part)
        if operation.background:
            drive()
        else:
            self._undriven.append(drive)
        return flight

    def _note_launch(
        self, collective: str, buckets: tuple[int, ...], flight: Flight, part: range | None
    ) -> None:
        notes, begin = self._turns.notes, self._turns.now
        number, nbytes = self._number * 10_000 + self._sent, flight.operation.nbytes
        for bucket in buckets:
            name = "bucket launch" if part is None else "bucket slice"
            size = self._plan.bytes[bucket] if part is None else len(part)
            self._turns.note(name, "launch", begin, bucket, size)

        def over(now: float) -> None:
            assert notes is not None
            notes.append(Note(collective, "operation", begin, now, number, nbytes))

        flight.then(over)

    # ---- waits ---------------------------------------------------------------------------------

    def wait(self, bucket: int) -> None:
        """Returns when its gradients are averages, or its current phase is over."""
        for at in self._schedule.slices_of[self._known(bucket)]:
            self._wait_for_slice(at)
        self._wait_for_gather(bucket)

    def _wait_for_slice(self, at: int) -> None:
        bucket = self._schedule.slices[at].bucket
        if bucket in self._complete or at in self._come:
            return
        if at not in self._flights:
            raise self._schedule.error(
                f"waits for {self._in_words(at)}, which is not launched, or comes after one in "
                f"{'slices' if self._schedule.cuts else 'order'}() that is not"
            )
        self._finish_first(at, *self._flights[at])

    def _wait_for_gather(self, bucket: int) -> None:
        if bucket in self._gathers:
            self._wait_for(self._gathers[bucket], "all_gather", (bucket,))
            del self._gathers[bucket]
            if not self._schedule.updates_parts:
                self._schedule.tell("bucket_complete", self, bucket)
            self._enter(bucket, self._at[bucket] + 1)

    def wait_for_all(self) -> None:
        for at, each in enumerate(self._schedule.slices):
            self._wait_for_slice(at)
            self._wait_for_gather(each.bucket)

    def _in_words(self, at: int) -> str:
        bucket, _, _, number = self._schedule.slices[at]
        return (f"slice {number} of " if self._schedule.cuts else "") + f"bucket {bucket}"

    def _finish_first(self, at: int, numbers: tuple[int, ...], flight: Flight) -> None:
        self._wait_for(flight, self._first, numbers)
        if self._hook is not None:
            self._turns.compute(self._hook.after * sum(self._plan.bytes[n] for n in numbers))
        self._come.add(at)
        bucket, _, _, slice_number = self._schedule.slices[at]
        self._schedule.tell("slice_complete", self, bucket, slice_number)
        is_all = all(other in self._come for other in self._schedule.slices_of[bucket])
        if not is_all or bucket in self._complete:
            return
        for number in numbers:
            self._complete.add(number)
            self._come.update(self._schedule.slices_of[number])
            self._enter(number, 1)
        if self._first == "all_reduce":
            for number in numbers:
                self._schedule.tell("bucket_complete", self, number)

    def _wait_for(self, flight: Flight, collective: str, numbers: tuple[int, ...]) -> None:
        for drive in self._undriven:
            drive()
        self._undriven.clear()
        words = f"bucket{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
        self._turns.wait_for(flight, f"{collective} of {words}")

    # ---- later phases --------------------------------------------------------------------------

    def update(self, bucket: int | Iterable[int]) -> None:
        """The optimizer's part, in one call of it."""
        if not self._later:
            raise self._schedule.error(
                "calls update(), though its phases have no update; the program steps by itself"
            )
        asked = [bucket] if isinstance(bucket, int) else list(dict.fromkeys(bucket))
        updated = [b for b in asked if self.has_stepped and not self._has_updated(b)]
        for number in updated:
            if self.next_phase(number) != "update":
                raise self._schedule.error(
                    f"updates bucket {number} before its {self.next_phase(number)} is over; wait "
                    "for the bucket first"
                )
        share = sum(self._plan.bytes[b] for b in updated) / max(1, sum(self._plan.bytes))
        if self._schedule.updates_parts:
            share /= self._turns.network.world
        begin = self._turns.now
        self._turns.compute(self._update_seconds * share + self._another_call(updated))
        if updated:
            self._turns.note("update", "compute", begin)
        for number in updated:
            self._enter(number, self._at[number] + 1)

    def _another_call(self, updated: Sequence[int]) -> float:
        """What the optimizer takes beside its bytes, for all calls of a step but one, which is in
        what was recorded."""
        self._calls += bool(updated)
        is_another = bool(updated) and self._calls > 1
        return self._turns.network.processors.update_call if is_another else 0.0

    def _has_updated(self, bucket: int) -> bool:
        return "update" in self._schedule.phases[: self._at[self._known(bucket)]]

    def _enter(self, bucket: int, phase: int) -> None:
        self._at[bucket] = phase
        self._unfinished -= phase > len(self._later)

    def _known(self, bucket: int) -> int:
        if not 0 <= bucket < self.buckets:
            raise IndexError(
                f"there is no bucket {bucket}: control.buckets is {self.buckets}, and they are "
                "numbered from 0"
            )
        return bucket

    # ---- what the rank asks --------------------------------------------------------------------

    @property
    def is_in_flight(self) -> bool:
        """Whether a bucket has not left its last phase."""
        return self._unfinished > 0

    def notice_complete(self) -> None:
        """Tells the schedule of buckets that became averages while backward went on."""
        for at in list(self._flights):
            if at not in self._come and self._has_come(at):
                self._wait_for_slice(at)

    def check_all_launched(self) -> None:
        if self._next < len(self._schedule.slices):
            raise self._schedule.error(
                f"has not launched {self._in_words(self._next)} by the end of "
                "backward; launch or skip every bucket"
            )

    def check_all_gathered(self) -> None:
        for bucket in range(self.buckets):
            if self.next_phase(bucket) is not None and bucket not in self._gathers:
                raise self._schedule.error(
                    f"has not launched all_gather of bucket {bucket} by the end of optimizer_step"
                )

    def finish(self, buckets: Iterable[int]) -> None:
        """Brings these buckets to the end of their phases."""
        for bucket in buckets:
            self.wait(bucket)
            while (phase := self.next_phase(bucket)) is not None:
                if phase != "update":
                    raise self._schedule.error(
                        f"has not launched the next phase of bucket {bucket}, {phase}"
                    )
                self.update(bucket)
