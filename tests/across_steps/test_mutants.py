"""The tests are tested: training across steps with one mistake differs from `bucketed`, or raises.

The schedules without a mistake, in Python too, pass the same check.
"""

import pytest

import dpcore
from dpcore.ddp.across_steps import whole_steps
from tests.across_steps.own_schedules import OWN, Dear, Priority, Zero1
from tests.across_steps.programs import CASES
from tests.across_steps.sides import Wrapped
from tests.across_steps.test_equal import assert_equal, seen

WORLD = 3


def compare(name, **wrapping):
    """With `bucketed`; what wraps the other side makes its schedule by itself."""
    case = CASES[name]

    def body(comm):
        schedule = wrapping["schedule"]
        one = schedule if isinstance(schedule, str) else schedule()
        sides = [
            Wrapped(comm, case, "adamw", "bucketed"),
            Wrapped(comm, case, "adamw", **{**wrapping, "schedule": one}),
        ]
        assert_equal(*(seen(side, case) for side in sides))

    dpcore.spawn(body, WORLD, mode="threads", timeout=20)


@pytest.mark.parametrize("name", ["plain", "learning rates", "unused", "accumulation", "shared"])
@pytest.mark.parametrize("schedule", OWN, ids=lambda schedule: schedule.__name__)
def test_schedules_in_python_give_the_bits_of_bucketed(schedule, name):
    compare(name, schedule=schedule)


# ---- in the schedule -------------------------------------------------------------------------


class LeavesOutAWait(Priority):
    """Of one module, whose weights are then those of the step before."""

    def forward_begin(self, control, module):
        if module != 1:
            super().forward_begin(control, module)


class UpdatesWithoutWaiting(Priority):
    def forward_begin(self, control, module):
        for bucket in self._needed_by(control, module):
            control.update(bucket)


class GathersOneBucketLate(Zero1):
    def forward_begin(self, control, module):
        if module:
            super().forward_begin(control, module - 1)


class NeverGathers(Zero1):
    """Each rank goes on with its own part of the weights."""

    def optimizer_step(self, control):
        for bucket in range(control.buckets):
            control.wait(bucket)
            control.update(bucket)


class StepsBeforeItGathers(Dear):
    """Each rank steps with the averages of its own part only."""

    def backward_end(self, control):
        pass

    def optimizer_step(self, control):
        for bucket in control.order_of_need():
            control.wait(bucket)
            control.update(bucket)


class GathersAsForwardNeeds(Zero1):
    """Ranks differ in the modules that they run, and so in what they launch."""

    def optimizer_step(self, control):
        for bucket in range(control.buckets):
            control.wait(bucket)
            control.update(bucket)

    def forward_begin(self, control, module):
        for bucket in self._needed_by(control, module):
            control.launch(bucket, background=False)
        super().forward_begin(control, module)


class NeverWaitsInForward(Zero1):
    """And has no forward_begin at all."""

    forward_begin = dpcore.LaunchSchedule.forward_begin


@pytest.mark.parametrize(
    ("schedule", "calls"),
    [
        (LeavesOutAWait, r"control\.wait\(bucket\) and control\.update\(bucket\)"),
        (NeverWaitsInForward, r"control\.wait\(bucket\)"),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_a_wait_that_is_left_out_is_said_to_be(schedule, calls):
    """With schedule, module, bucket and the calls; not that the module used something new."""
    name, phases = schedule.__name__, ", ".join(schedule().phases())
    said = (
        rf"rank \d: the forward of module \d uses \S+, and schedule '{name}' has not waited for "
        rf"its bucket \d, whose phases \({phases}\) are not over\. Let forward_begin call {calls}"
    )
    with pytest.raises(dpcore.Error, match=said):
        compare("plain", schedule=schedule)


# ---- around the model, and in the optimizer --------------------------------------------------


def skips_the_last_step(module, **options):
    """Nobody looks at what is left in flight when training is over."""
    model = dpcore.DataParallel(module, **options)
    for handle in model._across._handles:
        handle.remove()
    return model


class WithTheRatesOf(dpcore.DistributedOptimizer):
    """Notes the settings of another step."""

    _notes = staticmethod(whole_steps.hyperparameters_of)

    def step(self, closure=None):
        super().step(closure)
        self._steps._recorded = self._notes(self.optimizer)


class WithTheRatesOfTheNextStep(WithTheRatesOf):
    """The groups themselves, which a scheduler changes before the update."""

    _notes = staticmethod(lambda optimizer: optimizer.param_groups)


class WithTheRatesOfTheFirstStep(WithTheRatesOf):
    def step(self, closure=None):
        super().step(closure)
        self._first = getattr(self, "_first", self._steps._recorded)
        self._steps._recorded = self._first


class UpdatesTheFirstGroupOnly(dpcore.DistributedOptimizer):
    def step(self, closure=None):
        super().step(closure)
        self._steps._recorded = self._steps._recorded[:1]
        self._steps._group_of = {n: 0 for n, g in self._steps._group_of.items() if g == 0}


MUTANTS = {
    "leaves out a wait": ("plain", {"schedule": LeavesOutAWait}),
    "updates without waiting": ("plain", {"schedule": UpdatesWithoutWaiting}),
    "gathers one bucket late": ("plain", {"schedule": GathersOneBucketLate}),
    "never gathers": ("plain", {"schedule": NeverGathers}),
    "steps before it gathers": ("plain", {"schedule": StepsBeforeItGathers}),
    "gathers as forward needs": ("plain", {"schedule": GathersAsForwardNeeds}),
    "skips the last step": ("plain", {"schedule": "priority", "model": skips_the_last_step}),
    "rates of the next step": (
        "learning rates",
        {"schedule": "priority", "optimizer": WithTheRatesOfTheNextStep},
    ),
    "rates of the first step": (
        "learning rates",
        {"schedule": "dear", "optimizer": WithTheRatesOfTheFirstStep},
    ),
    "first group only": ("groups", {"schedule": "dear", "optimizer": UpdatesTheFirstGroupOnly}),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_is_killed(mutant):
    name, wrapping = MUTANTS[mutant]
    with pytest.raises((AssertionError, dpcore.Error)):
        compare(name, **wrapping)
