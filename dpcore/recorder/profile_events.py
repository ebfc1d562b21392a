"""Turns a profile of one rank into events of ``dpcore.trace`` and a description of its model.

The profiler gives gradients no names. In a model whose layers run one after the other they arrive
in the reverse order of its parameters, so the last to arrive is number 0, and a bucket holds the
gradients that arrived since the previous bucket was sent. If DDP rebuilds its buckets after the
first step, the run has two layouts, which are described like two models.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dpcore.recorder.file import DEVICE_TRACK, Event
from dpcore.recorder.profile_cpu import Operation, bytes_of, exposed_on_cpu, operations_on_cpu
from dpcore.recorder.profile_facts import facts_of
from dpcore.recorder.profile_file import Profile
from dpcore.recorder.profile_gpu import Launches, exposed_on_gpu, kernels_of, operations_on_gpu
from dpcore.recorder.profile_passes import (
    Backward,
    Step,
    backwards_of,
    forwards_of,
    optimizer_steps_of,
    passes_of,
    steps_of,
)
from dpcore.recorder.profiled import ProfileFacts

_QUEUED_NS = 10_000  # less between a call and its work is not a wait
Layout = tuple[tuple[int, int], ...]  # of each bucket: gradients, bytes


@dataclass
class RankProfile:
    """The events of one rank, at Unix times. ``layouts``: how gradients lie in buckets, by the
    number that events give as their model. ``gradients``: name and bytes, by number.
    ``knows_calls``: the file has the calls; without them exposed time is unknown."""

    rank: int
    world_size: int
    host: str
    library: str
    events: list[Event]
    steps: list[Step]
    layouts: list[Layout]
    gradients: list[tuple[str, int]]
    knows_calls: bool = True
    facts: ProfileFacts = field(default_factory=ProfileFacts)

    @property
    def operations(self) -> list[Event]:
        return [event for event in self.events if event.kind == "operation"]

    @property
    def span_ns(self) -> tuple[int, int]:
        """From the first event to the last."""
        return min(e.begin_ns for e in self.events), max(e.end_ns for e in self.events)

    def moved(self, by_ns: int) -> RankProfile:
        """The same at later times."""
        steps = [Step(s.number, s.begin_ns + by_ns, s.end_ns + by_ns) for s in self.steps]
        events = [event.moved(by_ns) for event in self.events]
        return replace(self, events=events, steps=steps, facts=self.facts.moved(by_ns))


def rank_profile(profile: Profile) -> RankProfile:
    """The events of a rank, in order of time."""
    backwards = backwards_of(profile)
    steps = steps_of(profile)
    communicate, compute = kernels_of(profile)
    on_gpu = bool(communicate)
    launches = Launches(profile) if on_gpu else None
    if launches is not None:
        operations = operations_on_gpu(communicate, launches)
    else:
        operations = operations_on_cpu(profile)
    _find_buckets(operations, backwards)
    exposed = (
        exposed_on_gpu(operations, compute)
        if on_gpu
        else exposed_on_cpu(profile, operations, backwards)
    )
    sent, layouts = _Buckets(operations, backwards, on_gpu).events()
    computed = _compute(profile, backwards, launches, compute)
    by_device = on_gpu and any(event.thread == DEVICE_TRACK for event in computed)
    events = computed + sent
    number_of = {id(operation): number for number, operation in enumerate(operations)}
    for number, operation in enumerate(operations):
        events += _operation(number, operation, profile.world_size, on_gpu)
    for begin, end, operation in exposed:
        thread = DEVICE_TRACK if on_gpu else _number(operation.thread)
        number = number_of[id(operation)]
        events.append(
            Event(operation.name, "exposed", -1, thread, number, operation.bytes, begin, end)
        )
    if not on_gpu and not layouts:
        events += _gradients(backwards, 0)
    last = backwards[-1].gradients[::-1] if backwards else []
    named = [(f"gradient {n}{_shape(g.args)}", bytes_of(g.args)) for n, g in enumerate(last)]
    return RankProfile(
        rank=profile.rank,
        world_size=profile.world_size,
        host=profile.host,
        library=next((op.library for op in operations), profile.backend),
        events=sorted(events, key=lambda event: (event.begin_ns, -event.end_ns)),
        steps=[] if by_device else steps,
        layouts=layouts,
        gradients=named,
        knows_calls=on_gpu or any(op.launch_ns < op.begin_ns for op in operations),
        facts=facts_of(profile, forwards_of(profile), [*communicate, *compute] if on_gpu else []),
    )


def described(
    layouts: Sequence[Layout], gradients: Sequence[tuple[str, int]]
) -> list[Mapping[str, Any]]:
    """Entries for ``otherData.models`` of a trace file."""
    models: list[Mapping[str, Any]] = []
    for number, layout in enumerate(layouts, 1):
        count = sum(many for many, _ in layout)
        lasts = [count - sum(many for many, _ in layout[:i]) for i in range(len(layout))]
        known = list(gradients)
        if len(known) != count:
            known = [(f"gradient {n}", 0) for n in range(count)]
        models.append(
            {
                "number": number,
                "name": f"layout {number}",
                "schedule": "torch DDP",
                "parameters": [name for name, _ in known]
                or [f"gradient {n}" for n in range(count)],
                "parameter_bytes": [size for _, size in known],
                "buckets": [
                    {"gradients": list(range(last - many, last)), "bytes": size, "dtype": ""}
                    for last, (many, size) in zip(lasts, layout, strict=True)
                ],
            }
        )
    return models


def _find_buckets(operations: Sequence[Operation], backwards: Sequence[Backward]) -> None:
    """Marks as buckets the all-reduces that a backward's own thread sent while it ran."""
    begins = [backward.begin_ns for backward in backwards]
    for operation in operations:
        at = bisect.bisect_right(begins, operation.launch_ns) - 1
        if at < 0 or operation.name != "all_reduce":
            continue
        backward = backwards[at]
        if operation.launch_ns <= backward.end_ns and operation.thread == backward.thread:
            operation.backward = at


class _Buckets:
    """Events of gradients and buckets, backward by backward."""

    def __init__(
        self, operations: Sequence[Operation], backwards: Sequence[Backward], on_gpu: bool
    ) -> None:
        self._backwards = backwards
        self._on_gpu = on_gpu
        self._sent: dict[int, list[Operation]] = {}
        for operation in operations:
            if operation.backward >= 0:
                self._sent.setdefault(operation.backward, []).append(operation)

    def events(self) -> tuple[list[Event], list[Layout]]:
        events: list[Event] = []
        layouts: list[Layout] = []
        for index, backward in enumerate(self._backwards):
            sent = sorted(self._sent.get(index, ()), key=lambda op: op.launch_ns)
            if not sent:
                continue
            layout = self._layout(backward, sent)
            if layout not in layouts:
                layouts.append(layout)
            model = layouts.index(layout) + 1
            for number, operation in enumerate(sent):
                at = operation.begin_ns if self._on_gpu else operation.launch_ns
                thread = DEVICE_TRACK if self._on_gpu else _number(operation.thread)
                what = -1, thread, number, operation.bytes, at, at
                events.append(Event("bucket launch", "launch", *what, model=model))
            if not self._on_gpu:
                events += _gradients([backward], model)
        return events, layouts

    def _layout(self, backward: Backward, sent: Sequence[Operation]) -> Layout:
        ends = [span.end_ns for span in backward.gradients]
        counts = [bisect.bisect_right(ends, operation.launch_ns) for operation in sent]
        before = [0, *counts[:-1]]
        return tuple(
            (count - earlier, operation.bytes)
            for count, earlier, operation in zip(counts, before, sent, strict=True)
        )


def _gradients(backwards: Sequence[Backward], model: int) -> list[Event]:
    events = []
    for backward in backwards:
        for number, span in enumerate(reversed(backward.gradients)):
            what = -1, _number(span.thread), number, bytes_of(span.args), span.end_ns, span.end_ns
            events.append(Event("gradient ready", "ready", *what, model=model))
    return events


def _compute(
    profile: Profile,
    backwards: Sequence[Backward],
    launches: Launches | None,
    compute: Sequence[Any],
) -> list[Event]:
    spans: list[tuple[str, int, int, int | str]] = []
    spans += [("forward", s.begin_ns, s.end_ns, s.thread) for s in forwards_of(profile)]
    passes = passes_of(profile)
    spans += [(p.name, p.begin_ns, p.end_ns, p.thread) for p in passes]
    if not passes:  # a pipeline's one backward would cover the forwards in between
        spans += [("backward", b.begin_ns, b.end_ns, b.thread) for b in backwards]
    spans += [("optimizer", s.begin_ns, s.end_ns, s.thread) for s in optimizer_steps_of(profile)]
    on_device: list[tuple[str, int, int, int | str]] = []
    if launches is not None:
        extents = launches.extents(compute, [(begin, end) for _, begin, end, _ in spans])
        for (name, *_), extent in zip(spans, extents, strict=True):
            if extent is not None:
                on_device.append((name, *extent, DEVICE_TRACK))
        # A file without launches has only the host's times.
        names = {"forward", *(p.name for p in passes)}
        spans = on_device if any(name in names for name, *_ in on_device) else spans
    return [Event(n, "compute", -1, _number(t), 0, 0, begin, end) for n, begin, end, t in spans]


def _operation(number: int, operation: Operation, world: int, on_gpu: bool) -> list[Event]:
    thread = DEVICE_TRACK if on_gpu else _number(operation.thread)
    begin = operation.begin_ns if on_gpu else operation.launch_ns
    name, size = operation.name, operation.bytes
    what = -1, thread, number, size, begin, operation.end_ns
    events = [Event(name, "operation", *what, path=operation.library, world=world)]
    if not on_gpu and operation.begin_ns - begin > _QUEUED_NS:
        reason = f"a thread of {operation.library}"
        events.append(Event(reason, "wait", -1, thread, number, size, begin, operation.begin_ns))
    return events


def _number(thread: int | str) -> int:
    return thread if isinstance(thread, int) else 0


def _shape(args: Any) -> str:
    """The shape of a gradient, or "" if the profiler recorded no shapes."""
    dims = args.get("Input Dims") or [[]]
    return f" ({' x '.join(map(str, dims[0]))})" if dims[0] else ""
