"""``dpcore.trace``: each rank's operations and waits, as a picture and as numbers.

    with dpcore.trace("run.json") as t:
        for batch in batches:
            with t.span("forward"):
                loss = model(batch)
            work = comm.all_reduce(gradient, async_op=True)
            with t.span("backward"):
                ...
            work.wait()
    print(t.exposed_ms, t.by_operation())

``dpcore show run.json`` makes a page of the file, and chrome://tracing and https://ui.perfetto.dev
open it. It has all ranks on one clock.

Events go into a ring of fixed size that is allocated at the start. A long run loses its oldest
events but does not slow down or use more memory. benchmarks/trace_cost.py measures the cost.

Over a communicator for GPUs the events are the device's, in the host's time: operations last from
the begin to the end of their kernels, forward and backward are shown as the stream runs them, and
time in which the stream waits for a result is exposed. The end of the block waits for operations
in flight.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from dpcore.base import plugged_in, screen
from dpcore.base.markup import frame
from dpcore.errors import Error, Unsupported
from dpcore.recorder import facts as trace_facts
from dpcore.recorder import file as trace_file
from dpcore.recorder.file import DEVICE_TRACK, Event, RankRecord
from dpcore.recorder.intervals import union_of
from dpcore.recorder.layers import record_layers

if TYPE_CHECKING:
    from dpcore.comm.communicators.native import Communicator

_PAGE_HEIGHT = 640  # pixels, in a notebook

# The traces that record now: one per process, or one per thread if ranks are threads.
_recording: dict[tuple[int, int], Trace] = {}


class Trace:
    """The result of ``dpcore.trace()``. It has figures and events once its block has ended."""

    def __init__(self, path: Path | None, comm: Communicator, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity {capacity}: room for at least one event is needed")
        if path is not None and path.is_dir():
            raise IsADirectoryError(f"trace: {path} is a directory; name a file in it")
        if path is not None and not path.absolute().parent.is_dir():
            raise FileNotFoundError(f"trace: there is no directory {path.absolute().parent}")
        self._comm = comm
        self._path = path
        self._capacity = capacity
        self._own: deque[Event] = deque(maxlen=capacity)  # spans and marks of the program
        self._own_count = 0
        self._hooks: list[Any] = []
        self._record: RankRecord | None = None
        self._state = "new"
        self.path: Path | None = None

    # ---- recording ---------------------------------------------------------------------------

    def __enter__(self) -> Trace:
        if self._state != "new":
            raise Error("a trace records one block; call dpcore.trace() again for the next")
        if self._comm.closed:
            raise Error("trace: this communicator was finalized; call dpcore.init() for a new one")
        self._key = _key_of(self._comm)
        if self._key in _recording and not _recording[self._key]._gives_way_to(self):
            raise Error(
                "a trace is recording already: there is one ring per rank, shared by all its "
                "communicators. Use span() of the outer trace to mark a part of it"
            )
        self._start()
        self._since_ns = time.monotonic_ns()
        _recording[self._key] = self
        self._state = "recording"
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        problem: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        del _recording[self._key]
        for hook in self._hooks:
            hook.remove()
        # First of all: exchanging the events must not become part of them.
        self._record = self._stop()
        self._state = "ended"
        if self._path is None:
            return
        if problem is not None or self._has_failed():
            self._write_alone(problem)
            return
        facts = self._facts()  # before the exchange, whose operations would be counted
        try:
            records = self._exchange()
        except BaseException as failure:
            self._write_alone(failure)
            raise
        if records:
            trace_file.write(self._path, records, self._comm.world_size, facts)
            self.path = self._path

    def _gives_way_to(self, other: Trace) -> bool:
        """Whether this trace has ended, so that ``other`` can record."""
        return False

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Records a block of the program, such as "forward", as an event of kind "compute"."""
        self._check_recording()
        begin = time.monotonic_ns()
        try:
            yield
        finally:
            self._add(name, "compute", begin, time.monotonic_ns())

    def layers(self, modules: Any) -> None:
        """Records forward and backward of each of these modules as spans, such as "layer 3" and
        "layer 3 back". Layers of a list are numbered; those of a mapping have its names.
        ``dpcore show`` gives the time spent waiting for each layer's collectives."""
        self._check_recording()
        self._hooks += record_layers(modules, self._add_layer)

    def mark(self, name: str) -> None:
        """Records a moment, such as "epoch 3", as an event of kind "mark"."""
        self._check_recording()
        now = time.monotonic_ns()
        self._add(name, "mark", now, now)

    def _check_recording(self) -> None:
        if self._state != "recording":
            raise Error("this trace is not recording: use span() and mark() inside its block")

    def _add_layer(self, name: str, begin: int, end: int) -> None:
        if self._state == "recording":  # a backward may run after the block
            self._add(name, "compute", begin, end)

    def _add_step(self, name: str, begin: int, end: int, model: int) -> None:
        """Records a step of a model with this number, or what of it lies within the trace."""
        self._add(name, "compute", max(begin, self._since_ns), end, model)

    def _add(self, name: str, kind: str, begin: int, end: int, model: int = 0) -> None:
        self._own_count += 1
        event = Event(name, kind, -1, threading.get_native_id(), 0, 0, begin, end, model=model)
        self._own.append(event)

    def _start(self) -> None:
        self._comm._native.start_trace(self._capacity)

    def _has_failed(self) -> bool:
        return self._comm._native.failed or self._comm.closed

    def _exchange(self) -> list[RankRecord]:
        """Everybody's record on rank 0, nothing on the others."""
        parts = _gather(self._comm._on_host, pickle.dumps(self._ended()))
        return [pickle.loads(part) for part in parts]

    def _stop(self) -> RankRecord:
        found, dropped, schedules = self._comm._native.stop_trace()
        merged = sorted([*map(Event._make, found), *self._own], key=lambda e: e.begin_ns)
        return RankRecord(
            rank=self._comm.rank,
            process=os.getpid(),
            threads=thread_names({event.thread for event in merged}, self._comm),
            dropped=dropped + self._own_count - len(self._own),
            events=merged,
            schedules={n: trace_file.describe(s) for n, s in schedules.items()},
        )

    def _facts(self) -> dict[str, Any]:
        return {} if self._comm.closed else trace_facts.facts_of(self._comm)

    def _write_alone(self, problem: BaseException | None) -> None:
        assert self._path is not None
        path = self._path.with_name(
            f"{self._path.stem}.rank{self._comm.rank}{self._path.suffix or '.json'}"
        )
        facts = self._facts()
        if problem is not None:
            facts["error"] = f"{type(problem).__name__}: {problem}"
        try:
            trace_file.write(path, [self._ended()], self._comm.world_size, facts)
        except OSError as failure:  # must not replace the error that ended the block
            warnings.warn(f"the trace could not be written: {failure}", stacklevel=3)
        else:
            self.path = path

    # ---- results -----------------------------------------------------------------------------

    def _ended(self) -> RankRecord:
        if self._record is None:
            raise Error("the trace has results when its block has ended")
        return self._record

    @property
    def events(self) -> list[Event]:
        """This rank's events in order of time."""
        return self._ended().events

    @property
    def dropped(self) -> int:
        """How many of this rank's events the ring lost: the oldest ones."""
        return self._ended().dropped

    @property
    def exposed_ms(self) -> float:
        """How long this rank's threads sat in communication calls instead of computing."""
        return union_of([e for e in self.events if e.kind == "exposed"]).total_ns * 1e-6

    @property
    def communication_ms(self) -> float:
        """How long at least one operation was in flight on this rank."""
        return union_of([e for e in self.events if e.kind == "operation"]).total_ns * 1e-6

    @property
    def overlap(self) -> float | None:
        """The share of communication time in which no thread waited; None without communication."""
        in_flight = union_of([e for e in self.events if e.kind == "operation"])
        exposed = union_of([e for e in self.events if e.kind == "exposed"])
        total = in_flight.total_ns
        return 1 - in_flight.within(exposed) / total if total else None

    def by_operation(self) -> dict[str, dict[str, Any]]:
        """For each collective: count, bytes, and milliseconds in flight and exposed."""
        result: dict[str, dict[str, Any]] = {}
        for event in self.events:
            if event.kind not in ("operation", "exposed"):
                continue
            line = result.setdefault(
                event.name, {"count": 0, "bytes": 0, "total_ms": 0.0, "exposed_ms": 0.0}
            )
            if event.kind == "exposed":
                line["exposed_ms"] += event.ms
            else:
                line["count"] += 1
                line["bytes"] += event.bytes
                line["total_ms"] += event.ms
        return result

    def by_wait(self) -> dict[str, float]:
        """Milliseconds in which operations made no progress, by what they waited for."""
        result: dict[str, float] = {}
        for event in self.events:
            if event.kind == "wait":
                result[event.name] = result.get(event.name, 0.0) + event.ms
        return result

    def show(self) -> None:
        """Opens the page of ``dpcore show``, below the cell of a notebook or else in a browser. It
        shows all ranks if the trace has a file, otherwise only this rank."""
        screen.show(self._page(), self)

    def _page(self) -> str:
        record = self._ended()
        if self.path is not None and self._comm.rank == 0:
            page = plugged_in.page_of_trace(self.path)
        else:
            own = trace_file.chrome_trace([record], self._comm.world_size, self._facts())
            page = plugged_in.page_of_trace((f"rank {self._comm.rank}", own))
        if page is None:
            raise Unsupported("trace: pages are made by dpcore/tools, which is missing here")
        return page

    def _repr_html_(self) -> str | None:
        """The page for notebooks, or None while the trace is recording."""
        return frame(self._page(), _PAGE_HEIGHT) if self._record is not None else None

    def __repr__(self) -> str:
        if self._record is None:
            return f"<Trace: {self._state}>"
        return (
            f"<Trace: {len(self.events)} events, {self.exposed_ms:.2f} ms exposed of "
            f"{self.communication_ms:.2f} ms communication>"
        )


def recording_of(comm: Any) -> Trace | None:
    """The trace that records this rank now."""
    return _recording.get(_key_of(comm)) if _recording else None


def _key_of(comm: Communicator) -> tuple[int, int]:
    return os.getpid(), threading.get_ident() if comm.transport == "inproc" else 0


def thread_names(used: set[int], comm: Any) -> dict[int, str]:
    """Names of these threads, this one first, and of the device's track."""
    of_python = {thread.native_id: thread.name for thread in threading.enumerate()}
    me = threading.get_native_id()
    names: dict[int, str] = {}
    for thread in sorted(used | {me}, key=lambda thread: (thread != me, thread)):
        if thread == DEVICE_TRACK:
            names[thread] = f"stream of {getattr(comm, 'device', 'the device')}"
            continue
        name = of_python.get(thread) or _name_of_native_thread(thread)
        names[thread] = "main" if name == "MainThread" else name
    return names


def _name_of_native_thread(thread: int) -> str:
    try:
        return Path(f"/proc/self/task/{thread}/comm").read_text().strip()
    except OSError:
        return f"thread {thread} (ended)"


def _gather(comm: Communicator, mine: bytes) -> list[bytes]:
    """All ranks' bytes on rank 0, an empty list on the others. Uses "auto", because the
    communicator's own algorithm may not have these collectives."""
    import numpy as np

    sizes = np.zeros(comm.world_size, np.int64)
    comm.all_gather(sizes, np.array([len(mine)], np.int64), algorithm="auto")
    total = int(sizes.sum())
    joined = np.empty(total, np.uint8) if comm.rank == 0 else None
    data = np.frombuffer(mine, np.uint8)
    comm.gather(joined, data, root=0, sizes=sizes.tolist(), algorithm="auto")
    if joined is None:
        return []
    ends = np.cumsum(sizes)
    return [joined[end - size : end].tobytes() for end, size in zip(ends, sizes, strict=True)]
