"""``measure_overlap`` measures how much of the communication of training is hidden.

Communication costs time in two ways. *Exposed* is the time in which the computing thread waits for
communication. *Slowdown* does not show in waits: communication takes processor time and memory
bandwidth from the computation beside it, all the more when ranks have few cores.

    overlap = 1 - (exposed + slowdown) / communication

With overlap 1, communication costs no time; with 0, as much as if it all ran after backward.

Steps with and without communication run in pairs, and only the difference within a pair counts: a
disturbance of the machine slows both. The interval is made of order statistics, so it assumes no
distribution of times, and a few disturbed steps do not move it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from dpcore.base.confidence import least_values, median_interval
from dpcore.comm.communicators.checks import check_integer
from dpcore.comm.communicators.protocol import capabilities_of
from dpcore.ddp.mistakes.observer import in_blocks
from dpcore.ddp.watched import OfLocalUpdates, OfTorch, face_of
from dpcore.ddp.wrapper.arguments import refuse_virtual
from dpcore.errors import Error, Unsupported
from dpcore.recorder.entry import trace
from dpcore.recorder.recording import Trace

_DOUBT = 0.025  # for each of the two quantities from which the overlap's interval is made

Run = Callable[[], "tuple[float, Trace | _Sums]"]  # milliseconds, and what was communicated


@dataclass(frozen=True)
class Overlap:
    """Medians in milliseconds per step on this rank. ``interval`` is the 95% confidence interval
    of the overlap."""

    step_ms: float  # forward and backward with communication
    alone_ms: float  # without, while all ranks compute: step_ms minus the difference of pairs
    communication_ms: float  # at least one operation in flight
    exposed_ms: float
    interval: tuple[float, float]

    @property
    def slowdown_ms(self) -> float:
        """How much the communication beside it slows down the computation."""
        return self.step_ms - self.exposed_ms - self.alone_ms

    @property
    def overlap(self) -> float:
        """The share of the communication that costs no time."""
        return 1.0 - (self.exposed_ms + self.slowdown_ms) / self.communication_ms

    def __str__(self) -> str:
        low, high = self.interval
        times = (
            f"slowdown {self.slowdown_ms:.2f} ms and exposed {self.exposed_ms:.2f} ms of "
            f"{self.communication_ms:.2f} ms of communication per step of {self.step_ms:.2f} ms"
        )
        if high - low > 1:
            return (
                f"overlap unknown: between {low:.2f} and {high:.2f} (95%), since step times vary "
                "by more than the communication takes. More steps or a quieter machine help; "
                f"{times}"
            )
        return f"overlap {self.overlap:.2f}, between {low:.2f} and {high:.2f} (95%); {times}"


def measure_overlap(model: Any, step: Callable[[], Any], steps: int = 20) -> Overlap:
    """Runs ``step`` with and without communication in pairs, on all ranks.

    ``model`` is a ``dpcore.DataParallel`` or a ``DistributedDataParallel`` of torch, whose
    communication lasts from the first bucket that it sends until the last one is there.

    ``step`` does forward and backward, and no optimizer step: half of its gradients are not
    averaged. Gradients are dropped before each step. At its end it waits for buckets that the
    schedule left in flight, as an optimizer would, and counts that wait as exposed.

    ``model`` may also be the block of a ``dpcore.LocalSGD`` or ``DiLoCo`` that has not been
    entered. ``step`` then steps the optimizer as well, and nothing but that: ``measure_overlap``
    enters the block, runs whole intervals of ``sync_every`` steps in the place of single steps, and
    finally puts module, optimizer and block back. Figures are means of an interval's steps.

    >>> print(dpcore.measure_overlap(model, lambda: loss(model(x)).backward()))  # doctest: +SKIP
    overlap 0.62, between 0.55 and 0.68 (95%); slowdown 2.60 ms and exposed 1.10 ms of 9.60 ms of
    communication per step of 41.20 ms
    """
    model = _checked(model, steps)
    if not callable(step):
        raise TypeError(
            f"measure_overlap(model, step): step is a function that does forward and backward, not "
            f"a {type(step).__name__}"
        )
    together = getattr(model, "steps_together", 1)
    with_it, cost, in_flight, exposed = [], [], [], []
    kinds = _of_a_block if isinstance(model, OfLocalUpdates) else _of_steps
    with kinds(model, step) as (run, run_alone):
        for _ in range(2):  # buckets are rebuilt in the second
            run()
        run_alone()
        for number in range(steps):
            # In turn, so that neither is always the one that follows the other.
            before = run_alone()[0] if number % 2 else None
            ms, recorded = run()
            alone = run_alone()[0] if before is None else before
            with_it.append(ms / together)
            cost.append((ms - alone) / together)
            in_flight.append(recorded.communication_ms / together)
            exposed.append(recorded.exposed_ms / together)
    model.zero_grad()
    if min(in_flight) == 0:
        raise Error(
            "measure_overlap: a step without communication has no overlap. `step` must call the "
            "model and backward, outside no_sync()"
        )
    return Overlap(
        step_ms=statistics.median(with_it),
        alone_ms=statistics.median(with_it) - statistics.median(cost),
        communication_ms=statistics.median(in_flight),
        exposed_ms=statistics.median(exposed),
        interval=_interval(cost, in_flight),
    )


@contextmanager
def _of_steps(model: Any, step: Callable[[], Any]) -> Iterator[tuple[Run, Run]]:
    """A step with communication, and one without."""

    def run() -> tuple[float, Trace | _Sums]:
        model.zero_grad()
        return _timed(model, whole)

    def whole() -> None:
        step()
        model._reducer.wait_for_gradients()

    def run_alone() -> tuple[float, Trace | _Sums]:
        model.require_forward_param_sync = False  # a forward after a synchronised one sends buffers
        with model.no_sync():
            found = run()
        model.require_forward_param_sync = True
        return found

    yield run, run_alone


@contextmanager
def _of_a_block(model: Any, step: Callable[[], Any]) -> Iterator[tuple[Run, Run]]:
    """An interval of local updates with its sends, and one without."""
    block = model.owner

    def interval() -> None:
        for _ in range(block.sync_every):
            model.zero_grad()
            step()

    def run() -> tuple[float, Trace | _Sums]:
        before = block._steps
        found = _timed(model, interval)
        if (made := block._steps - before) != block.sync_every:
            raise Error(
                f"measure_overlap: `step` has called optimizer.step() {made} times in "
                f"{block.sync_every} calls; of a {type(block).__name__} it does forward, backward "
                "and one step of its optimizer"
            )
        return found

    def run_alone() -> tuple[float, Trace | _Sums]:
        with block._uncounted():
            return _timed(model, interval)

    with block._put_back():
        # What is sent after the last step of an interval may land ``_delay`` steps later. Intervals
        # that begin there have nothing in flight at either end.
        block._steps += (block._delay - block._steps) % block.sync_every
        with block:
            yield run, run_alone


def _timed(model: Any, work: Callable[[], Any]) -> tuple[float, Trace | _Sums]:
    _meet(model)
    traces = capabilities_of(model.group).traces
    with trace(comm=model.group) if traces else _Sums(model) as recorded:
        finish_device(model.device)
        begin = time.perf_counter()
        work()
        finish_device(model.device)
        ms = (time.perf_counter() - begin) * 1e3
    return ms, recorded


class _Sums:
    """What the reducer has noted of the steps in a block, where the group has no events."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __enter__(self) -> _Sums:
        self._model._reducer.watch(True)
        self._before = self._now()
        return self

    def __exit__(self, *_: object) -> None:
        exposed, communication = (
            (now - before) * 1e-6 for now, before in zip(self._now(), self._before, strict=True)
        )
        self._model._reducer.watch(vars(self._model).get("_monitor") is not None)
        self.exposed_ms, self.communication_ms = exposed, communication

    def _now(self) -> tuple[int, int]:
        _, _, waited, communication, _ = self._model._reducer.sums()
        return waited + self._model._model_group.waited_ns, communication


def _meet(model: Any) -> None:
    """A barrier; a group of one's own may have an all-reduce alone."""
    if hasattr(model.group, "barrier"):
        model.group.barrier()
    else:
        model.group.all_reduce(torch.zeros(1, device=model.device), "max", async_op=False)


def finish_device(device: torch.device) -> None:
    """Waits until a GPU has finished its work. On other devices calls are synchronous."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _checked(model: Any, steps: int) -> Any:
    given, model = model, face_of(model)
    if model is None:
        raise TypeError(
            f"measure_overlap: expected a dpcore.DataParallel, a DistributedDataParallel of torch, "
            f"or the block of a LocalSGD or DiLoCo, not a {type(given).__name__}; wrap the model "
            "first"
        )
    if isinstance(model, OfLocalUpdates) and model.owner._counted in in_blocks:
        raise Unsupported(
            f"measure_overlap: this {type(given).__name__} has been entered. Call it before the "
            "block: it enters the block itself, and finally puts module, optimizer and block back"
        )
    refuse_virtual(model, "measure_overlap")
    group = model.group
    is_known = model.device_type == "cpu" or isinstance(model, OfTorch)
    if not capabilities_of(group).traces and not is_known:
        raise Unsupported(
            f"measure_overlap: {model.backend} does not say when its operations run on "
            f"{model.device_type}; wrap the model with comm=dpcore.init()"
        )
    if group.world_size == 1:
        raise Unsupported("measure_overlap: one rank has nothing to communicate; run several")
    if not model.is_exact:
        raise Unsupported(
            f"measure_overlap: the schedule '{model.schedule}' leaves out communication, so there "
            "is none to hide; measure a schedule that averages gradients"
        )
    least = least_values(_DOUBT)
    if check_integer(steps, "measure_overlap: steps") < least:
        raise ValueError(
            f"measure_overlap: steps={steps} are too few to say how far the result can be "
            f"trusted; at least {least} are needed"
        )
    return model


def _interval(cost: Sequence[float], communication: Sequence[float]) -> tuple[float, float]:
    """The interval of 1 - cost / communication, from the intervals of both medians."""
    least_cost, most_cost = median_interval(cost, _DOUBT)
    least, most = median_interval(communication, _DOUBT)
    return (
        1 - most_cost / (least if most_cost > 0 else most),
        1 - least_cost / (most if least_cost > 0 else least),
    )
