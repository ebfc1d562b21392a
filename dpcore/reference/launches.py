"""The named launch schedules: when buckets are sent, and how large they are.

    bucketed       each bucket as soon as its last gradient is ready
    sequential     all buckets, after backward
    per_parameter  as bucketed, with a bucket for each parameter
    flat           as bucketed, with one bucket for everything
    oracle         never: what remains is the time that no schedule can save

These continue under the next forward, and across_steps.py has what they compute:

    priority       as bucketed, but buckets that forward needs first overtake others
    dear           the first half of each all-reduce under backward, the second under forward
    zero1          the same, but each rank steps its part, and parameters are gathered
    zero2          the same, and each rank keeps only its part of the gradients

A schedule hears events and answers by calls on a ``control``: the reducer in training, a simulated
rank in ``dpcore simulate``. These are the twins of csrc/reducer/launch/launch_schedule.cpp, and
``DataParallel`` takes them as well. A test drives both with the same events and compares their
calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dpcore.reference.launch_schedule import LaunchSchedule

UNLIMITED = 1 << 62


# ---- until the end of backward -------------------------------------------------------------------


class Bucketed(LaunchSchedule):
    """No bucket overtakes another, since backward ends when all of them are complete."""

    def bucket_ready(self, control: Any, bucket: int) -> None:
        control.launch(bucket)

    def backward_end(self, control: Any) -> None:
        control.wait_for_all()


class PerParameter(Bucketed):
    def caps(self, wanted: Sequence[int]) -> Sequence[int]:
        return [0]


class Flat(Bucketed):
    def caps(self, wanted: Sequence[int]) -> Sequence[int]:
        return [UNLIMITED]


class Sequential(LaunchSchedule):
    """The thread that waits drives each bucket: nothing runs beside the computation."""

    def backward_end(self, control: Any) -> None:
        for bucket in range(control.buckets):
            control.launch(bucket, background=False)
        control.wait_for_all()


class Oracle(LaunchSchedule):
    def is_exact(self) -> bool:
        return False

    def backward_end(self, control: Any) -> None:
        for bucket in range(control.buckets):
            control.skip(bucket)


# ---- across steps --------------------------------------------------------------------------------


class AcrossSteps(LaunchSchedule):
    """Buckets are numbered as they get ready, about the reverse of the order in which forward needs
    them: a later bucket is more urgent."""

    def bucket_ready(self, control: Any, bucket: int) -> None:
        self._send(control, bucket)

    def forward_begin(self, control: Any, module: int) -> None:
        for gradient in control.gradients_of_module(module):
            bucket = control.bucket_of(gradient)
            if bucket is not None and control.next_phase(bucket):
                self._bring(control, bucket)

    def _bring(self, control: Any, bucket: int) -> None:
        """The module needs it."""
        control.wait(bucket)

    def _send(self, control: Any, bucket: int) -> None:
        control.launch(bucket, priority=control.buckets + bucket)


class WholeUpdates(AcrossSteps):
    """One call of the optimizer updates all buckets that have come. They are updated while the
    thread would only wait for another bucket, too."""

    def _bring(self, control: Any, bucket: int) -> None:
        while not control.is_over(bucket) and self._update_what_came(control):
            pass
        control.wait(bucket)
        self._update_what_came(control)

    def _update_what_came(self, control: Any) -> bool:
        came = []
        for bucket in control.order_of_need():
            if control.next_phase(bucket) and control.is_over(bucket):
                control.wait(bucket)
                came.append(bucket)
        control.update(came)
        return bool(came)


class Priority(WholeUpdates):
    def phases(self) -> list[str]:
        return ["all_reduce", "update"]


class Dear(WholeUpdates):
    def phases(self) -> list[str]:
        return ["reduce_scatter", "all_gather", "update"]

    def backward_end(self, control: Any) -> None:
        for bucket in range(control.buckets):
            self._send(control, bucket)  # the second half, behind the first


class Zero1(AcrossSteps):
    def phases(self) -> list[str]:
        return ["reduce_scatter", "update", "all_gather"]

    def optimizer_step(self, control: Any) -> None:
        """Gathers in the order of need. What has come is updated while what comes first in that
        order is on its way."""
        for bucket in control.order_of_need():
            while not control.is_over(bucket) and self._update_one(control):
                pass
            self._gather(control, bucket)
        for bucket in range(control.buckets):
            self._gather(control, bucket)  # what no module needs

    def _update_one(self, control: Any) -> bool:
        for bucket in control.order_of_need():
            if control.next_phase(bucket) != "all_gather" and control.is_over(bucket):
                control.wait(bucket)
                control.update(bucket)
                return True
        return False

    def _gather(self, control: Any, bucket: int) -> None:
        """First halves are more urgent, since ``step()`` waits for all of them."""
        if control.next_phase(bucket) != "all_gather":
            control.wait(bucket)
            control.update(bucket)
        control.launch(bucket, priority=bucket)


class Zero2(Zero1):
    def whole_buckets(self) -> int:
        return 4


# ---- by name -------------------------------------------------------------------------------------

_NAMED: dict[str, type[LaunchSchedule]] = {
    "bucketed": Bucketed,
    "sequential": Sequential,
    "per_parameter": PerParameter,
    "flat": Flat,
    "oracle": Oracle,
    "priority": Priority,
    "dear": Dear,
    "zero1": Zero1,
    "zero2": Zero2,
}
SCHEDULES = tuple(name for name, kind in _NAMED.items() if not issubclass(kind, AcrossSteps))
ACROSS_STEPS = tuple(name for name in _NAMED if name not in SCHEDULES)
EXACT = SCHEDULES[:4]  # gradients are averaged
CAPPED = SCHEDULES[:2]  # buckets have the requested size


def make_launch_schedule(name: str) -> LaunchSchedule:
    return _NAMED[name]()


def caps_of(schedule: str, wanted: Sequence[int]) -> Sequence[int]:
    """The ``caps`` of the schedule with this name; other names keep what is wanted.

    >>> caps_of("bucketed", [1 << 20, 25 << 20]), caps_of("per_parameter", [1 << 20, 25 << 20])
    ([1048576, 26214400], [0])
    """
    return _NAMED.get(schedule, LaunchSchedule)().caps(wanted)
