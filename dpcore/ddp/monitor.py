"""``dpcore.monitor``: a line every n steps.

    monitor = dpcore.monitor(model, log_every_n_steps=50)
    for inputs, targets in loader:
        ...
    monitor.close()  # or: with dpcore.monitor(model) as monitor:

    step 50: 41.2 ms, exposed 1.10 of 9.60 ms of communication, overlap 89%, 17.9 MiB; compute
    differs by 2%, no rank is slow

Nothing is traced. The reducer keeps sums of times and bytes (csrc/reducer/backward/
step_figures.h). They are read before each forward, and a step's figures are the differences.
Between two lines ranks send nothing. For a line each rank sends the medians of its steps, 11
numbers, in an all-reduce that overlaps the step; the line is printed in the next step.

On a GPU times are those of events in its streams (csrc/cuda/device/device_trace.h). A step counts
once the GPU is done with it, which is asked at each forward and never waited for. A group of torch
or an MPI library does not say when its operations run there: lines then have the time of a step on
the host and its bytes alone.
"""

from __future__ import annotations

import math
import time
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from dpcore.comm.communicators.protocol import capabilities_of
from dpcore.ddp.torch_face import dynamo
from dpcore.ddp.watched import before_each_step, face_of, owner_of
from dpcore.ddp.wrapper.arguments import refuse_virtual
from dpcore.ddp.wrapper.module_state import digest_of
from dpcore.errors import Error, Mismatch, Unsupported
from dpcore.recorder.step_figures import RankSteps, Step, figures_of, line_of, numbers_of, summary

_FIRST_LINE = 16  # steps before the first line, so that a slow rank is known early
_LEAST_WINDOW, _MOST_WINDOW = 16, 256  # steps that a line covers
_CONTENT = digest_of(["dpcore.monitor"])


class _Moment(NamedTuple):
    """The reducer's sums since the model was wrapped, read before a forward, in nanoseconds."""

    now: int
    waited_for_module: int  # for buffers and batch normalisation: within forward and backward
    backwards: int
    compute: int
    waited: int
    communication: int
    bytes: int

    def step_since(self, before: _Moment) -> Step:
        of_module = self.waited_for_module - before.waited_for_module
        return Step(
            (self.now - before.now) * 1e-6,
            max(0, self.compute - before.compute - of_module) * 1e-6,
            (self.waited - before.waited + of_module) * 1e-6,
            (self.communication - before.communication) * 1e-6,
            float(self.bytes - before.bytes),
        )


class _HostSteps:
    """The steps of a model as the host sees them, which on the CPU is all there is to see."""

    def __init__(self, model: Any, knows_times: bool = True) -> None:
        self._model, self.knows_times = model, knows_times
        self._before: _Moment | None = None

    def ended(self) -> tuple[int, list[Step]]:
        """Called before each forward: the number of backwards, and the steps that have ended."""
        model = self._model
        of_module = model._model_group.waited_ns
        now, before = _Moment(time.monotonic_ns(), of_module, *model._reducer.sums()), self._before
        if before is not None and now.backwards == before.backwards:
            return now.backwards, []  # no backward followed the forward
        self._before = now
        if before is None or now.backwards <= 1:  # the first one makes the memory
            return now.backwards, []
        step = now.step_since(before)
        return now.backwards, [
            step if self.knows_times else Step(step.step_ms, 0, 0, 0, step.bytes)
        ]

    def forward_begins(self) -> None:
        """The host needs no event."""

    def close(self) -> None:
        """Nothing to end."""


class _DeviceSteps:
    """The same by events of a device: the steps that it is done with, some forwards later."""

    def __init__(self, model: Any) -> None:
        self._reducer, self._native, self._group = model._reducer, model.group._native, model.group
        self._native.watch(True)
        self._count(1)
        self._before: tuple[int, int, int] | None = None  # backwards, bytes, mark
        self._in_flight: deque[tuple[int, int, int]] = deque(maxlen=_MOST_WINDOW)

    def ended(self) -> tuple[int, list[Step]]:
        """See ``_HostSteps``."""
        backwards, _, _, _, sent = self._reducer.sums()
        before = self._before
        if before is None or backwards != before[0]:
            self._before = (backwards, sent, self._native.mark())
            if before is not None and backwards > 1:
                self._in_flight.append((before[2], self._before[2], sent - before[1]))
        steps = []
        while self._in_flight:
            after, until, size = self._in_flight[0]
            if (sums := self._native.sums(after, until)) is None:
                break
            self._in_flight.popleft()
            if sums:  # else a trace has taken the events over
                step, compute, exposed, communication = (ns * 1e-6 for ns in sums)
                steps.append(Step(step, compute, exposed, communication, float(size)))
        return backwards, steps

    def forward_begins(self) -> None:
        """Marks it in the stream; the reducer marks the last gradient."""
        self._reducer.backward_begins()

    def close(self) -> None:
        """Other models may be watched over the same communicator."""
        if self._count(-1) == 0:
            self._native.watch(False)

    def _count(self, more: int) -> int:
        counted: int = vars(self._group).get("_watched", 0) + more
        vars(self._group)["_watched"] = counted
        return counted


class _MeanSteps:
    """Steps of which only some send: those of an interval as their mean."""

    def __init__(self, model: Any) -> None:
        self._steps = _HostSteps(model, knows_times=model.device_type == "cpu")
        self.knows_times = self._steps.knows_times
        self._together, self._kept = model.steps_together, deque[Step]()

    def ended(self) -> tuple[int, list[Step]]:
        """See ``_HostSteps``."""
        steps, ended = self._steps.ended()
        self._kept.extend(ended)
        if len(self._kept) < self._together:
            return steps, []
        mean = Step(
            *(math.fsum(values) / len(self._kept) for values in zip(*self._kept, strict=True))
        )
        count = len(self._kept)
        self._kept.clear()
        return steps, [mean] * count

    def forward_begins(self) -> None:
        """The host needs no event."""

    def close(self) -> None:
        """Nothing to end."""


def _steps_of(model: Any) -> _HostSteps | _MeanSteps | _DeviceSteps:
    if getattr(model, "steps_together", 1) > 1:
        return _MeanSteps(model)
    if capabilities_of(model.group).core and hasattr(model.group._native, "sums"):
        return _DeviceSteps(model)
    return _HostSteps(model, knows_times=model.device_type == "cpu")


class Monitor:
    """The result of ``monitor``. It works until ``close()``, or until the end of its block."""

    def __init__(self, model: Any, every: int, tell: Callable[[dict[str, Any]], Any]) -> None:
        """``model``: what ``face_of`` gives."""
        self._model = model
        self._every, self._tell = every, tell
        window = min(max(every, _LEAST_WINDOW), _MOST_WINDOW)
        self._steps: deque[Step] = deque(maxlen=window)
        self._pending: tuple[Any, torch.Tensor, int] | None = None
        self._notes_told = 0
        self._taken_at = -1  # number of backwards
        self.last: dict[str, Any] | None = None
        """The figures of the last line, on every rank."""
        self._source: _HostSteps | _MeanSteps | _DeviceSteps = _HostSteps(None)
        self.lines = 0
        """The number of lines, including one in flight: the same on all ranks."""
        self._begin()
        vars(owner_of(model))["_monitor"] = self
        self._hook: Any = before_each_step(model, self._step_begins)

    def _begin(self) -> None:
        """Starts over with a new reducer: the model was wrapped, or refreshed."""
        self._reducer = self._model._reducer
        self._reducer.watch(True)
        self._source.close()
        self._source = _steps_of(self._model)
        self._line_at: int = self._reducer.sums()[0] + min(_FIRST_LINE, self._every)

    # ---- while it trains ---------------------------------------------------------------------

    @dynamo.left_alone
    def _step_begins(self, *_: Any) -> None:
        model = self._model
        if model is None or not torch.is_grad_enabled():
            return
        if not model.require_backward_grad_sync:
            return  # a step is from one synchronised forward to the next
        backwards = self._note_step()
        if not model._join_config.enable:
            self._exchange_when_due(backwards)
        self._source.forward_begins()

    def _note_step(self) -> int:
        """Keeps the steps that have ended. Returns the number of backwards."""
        if self._model._reducer is not self._reducer:
            self._begin()
        backwards, ended = self._source.ended()
        self._steps.extend(ended)
        if backwards != self._taken_at:
            self._taken_at = backwards
            self._take()
        return backwards

    def _exchange_when_due(self, backwards: int) -> None:
        """Exchanges the medians if a line is due. All ranks call it before the same synchronised
        forward, for which all have inputs."""
        if backwards >= self._line_at:
            self._line_at = (backwards // self._every + 1) * self._every
            self._exchange(backwards)

    def _exchange(self, step: int) -> None:
        self._take(wait=True)
        self.lines += 1
        group = self._model._model_group
        own = torch.tensor(summary(list(self._steps)), dtype=torch.float64)
        if group.world_size == 1:
            self._say(step, own.unsqueeze(0))
            return
        rows = torch.zeros(group.world_size, len(own), dtype=torch.float64)
        rows[group.rank] = own
        self._pending = *_sum(self._model, rows, async_op=True), step

    def _take(self, wait: bool = False) -> None:
        """Prints or passes on the line whose exchange is complete."""
        if self._pending is None:
            return
        work, rows, step = self._pending
        is_completed = getattr(work, "is_completed", None)
        if not wait and is_completed is not None and not is_completed():
            return
        self._pending = None
        work.wait()
        self._say(step, rows)

    def _say(self, step: int, rows: torch.Tensor) -> None:
        notes = self._model._mistakes.notes
        new, self._notes_told = notes[self._notes_told :], len(notes)
        self.last = figures_of(step, [RankSteps(*row) for row in rows.tolist()], new)
        if self._model.group.rank == 0:
            self._tell(self.last)

    @property
    def _knows_times(self) -> bool:
        """Whether lines have exposed time and overlap. Not for a group on a GPU that keeps its
        times to itself."""
        return isinstance(self._source, _DeviceSteps) or self._source.knows_times

    # ---- for the program ---------------------------------------------------------------------

    def figures(self) -> dict[str, Any]:
        """The figures of the last steps, at once. All ranks call it between two steps; it also
        prints a line."""
        if self._model is None:
            raise Error("monitor: this one is closed; its last figures are in `last`")
        self._exchange(self._note_step())
        self._take(wait=True)
        assert self.last is not None
        return self.last

    def close(self) -> None:
        """Ends the monitor on this rank. Sends nothing, and waits for a line in flight."""
        if self._model is None:
            return
        try:
            self._take(wait=True)
        finally:
            self._end()

    def _end(self) -> None:
        self._hook.remove()
        vars(owner_of(self._model)).pop("_monitor", None)
        self._reducer.watch(False)
        self._source.close()
        self._source = _HostSteps(None)
        self._model = self._pending = None

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self.close()
        elif self._model is not None:
            self._end()  # the other ranks may never send their part of a line

    def __repr__(self) -> str:
        state = "closed" if self._model is None else f"every {self._every} steps"
        return f"<Monitor: {state}; {line_of(self.last) if self.last else 'no line yet'}>"

    def __reduce__(self) -> Any:
        return _closed, ()  # a copy of the model is not monitored


def _closed() -> Monitor:
    monitor = Monitor.__new__(Monitor)
    monitor._model = monitor._pending = monitor.last = None
    monitor.lines = 0
    return monitor


def monitor(
    model: Any,
    log_every_n_steps: int = 50,
    to: Any = "stdout",
) -> Monitor:
    """Reports the cost of steps at intervals, as a line or as figures for a logger.

    ``model`` is a ``dpcore.DataParallel``, a ``DistributedDataParallel`` of torch, or the block of
    a ``dpcore.LocalSGD`` or ``DiLoCo``. All ranks call it, between the same two steps. ``to`` says
    what rank 0 does with the figures:

    ``"stdout"``       prints a line,
    ``SummaryWriter``  of tensorboard or tensorboardX: adds scalars, ``dpcore/exposed_ms`` ...,
    ``callable``       is called with the dictionary of docs/monitor.md,
    ``None``           nothing. ``monitor.last`` has the figures on every rank.

    The first line comes after 16 steps, if that is sooner. A line covers the steps since the
    previous one, but at least 16 and at most 256.

    >>> with dpcore.monitor(model, log_every_n_steps=100) as monitor:    # doctest: +SKIP
    ...     train_one_epoch()
    step 16: 41.2 ms, exposed 1.10 of 9.60 ms of communication, overlap 89%, 17.9 MiB; ...
    """
    face = face_of(model)
    if face is None:
        raise TypeError(
            f"monitor(model): a dpcore.DataParallel is needed, not a {type(model).__name__}; a "
            "DistributedDataParallel of torch, a LocalSGD or a DiLoCo do as well"
        )
    refuse_virtual(face, "monitor")
    every = log_every_n_steps
    if not isinstance(every, int) or isinstance(every, bool) or not 0 < every < 2**31:
        raise Unsupported(
            f"monitor: log_every_n_steps={every!r}: it must be a whole number, at least 1"
        )
    tell = teller_of(to)
    if vars(model).get("_monitor") is not None:
        raise Error("monitor: this model has a monitor already; close that one first")
    _check_alike(face, every)
    made = Monitor(face, every, tell)
    if not made._knows_times and face.group.rank == 0:
        warnings.warn(
            f"monitor: {face.backend} does not say when its operations run on "
            f"{face.device_type}, so lines have the time of a step and its bytes, and neither "
            "exposed time nor overlap; for these, wrap the model with comm=dpcore.init()",
            stacklevel=2,
        )
    return made


def teller_of(to: Any) -> Callable[[dict[str, Any]], Any]:
    """The function that rank 0 calls with the figures."""
    if to is None:
        return lambda figures: None
    if to == "stdout":
        return lambda figures: print(line_of(figures), flush=True)
    if hasattr(to, "add_scalar"):
        return lambda figures: _add_scalars(to, figures)
    if callable(to):
        found: Callable[[dict[str, Any]], Any] = to
        return found
    raise Unsupported(
        f'monitor: to={to!r}: "stdout", a SummaryWriter, a callable or None is needed'
    )


def _add_scalars(writer: Any, figures: dict[str, Any]) -> None:
    for name, value in numbers_of(figures).items():
        writer.add_scalar(name, value, figures["step"])


def _sum(model: Any, rows: torch.Tensor, async_op: bool) -> tuple[Any, torch.Tensor]:
    """The work, and the tensor that has the sum over ranks when it is complete. Communicators for
    GPUs have one for the host beside them, so that no stream is involved."""
    on_host = getattr(model.group, "_on_host", model.group)
    if on_host is not model.group:
        layout = _CONTENT ^ model._model_group.tag
        return on_host.all_reduce(rows.view(-1), "sum", async_op=async_op, layout=layout), rows
    rows = rows.to(model.device)
    group = model._model_group
    return group.all_reduce(rows.view(-1), "sum", async_op=async_op, content=_CONTENT), rows


def _check_alike(model: Any, every: int) -> None:
    """Raises if ranks differ, since they would then exchange lines in different steps."""
    backwards = model._reducer.sums()[0]
    here = [every, backwards]
    rows = torch.zeros(model.group.world_size, 2, dtype=torch.float64)
    rows[model.group.rank] = torch.tensor(here, dtype=torch.float64)
    _, rows = _sum(model, rows, async_op=False)
    most, least = ([int(value) for value in of] for of in (rows.amax(0), rows.amin(0)))
    if most != least:
        raise Mismatch(
            f"monitor: rank {model.group.rank} wants a line every {every} steps after step "
            f"{backwards}, and ranks differ (every {least[0]} to {most[0]} steps, after step "
            f"{least[1]} to {most[1]}): call it on all ranks with the same number, between the "
            "same steps"
        )
