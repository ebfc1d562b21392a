"""What a training does, as functions of a side: ``side`` is one of sides.py.

A program returns numbers that it saw on the way. ``CASES`` says which model each runs with.
"""

from dataclasses import dataclass

from tests.across_steps import models

STEPS = 3


def plain(side):
    for number in range(STEPS):
        side.backward(number)
        side.step()


def losses(side):
    """What a step computes with is what the step before has made."""
    seen = []
    for number in range(STEPS):
        seen.append(side.backward(number))
        side.step()
    return seen


def accumulation(side):
    for number in range(STEPS):
        side.accumulate(10 + number)
        side.accumulate(20 + number)
        side.backward(number)
        side.step()


def accumulation_in_the_middle(side):
    """The first pass of a step, without communication, finds what the step before left."""
    plain(side)
    side.accumulate(10)
    side.backward(11)
    side.step()
    plain(side)


def clipping(side):
    """By the largest gradient, whose value does not depend on how gradients are added up."""
    seen = []
    for number in range(STEPS):
        side.backward(number)
        seen.append(side.clip(0.01 * (number + 1), float("inf")))
        side.step()
    return seen


def clipping_by_norm(side):
    seen = []
    for number in range(STEPS):
        side.backward(number)
        seen.append(side.clip(0.05, 2.0))
        side.step()
    return seen


def learning_rates(side):
    """An update that is late takes the rate of its own step."""
    for number in range(2 * STEPS):
        side.backward(number)
        side.step()
        side.scale_rates(0.5 if number % 2 else 1.5)


def evaluation_in_between(side):
    seen = []
    for number in range(STEPS):
        side.backward(number)
        side.step()
        seen.append(side.evaluate(number))
    return seen


def evaluation_before_the_step(side):
    """Validation with the old weights, while gradients are under way."""
    seen = []
    for number in range(STEPS):
        side.backward(number)
        seen.append(side.evaluate(number))
        side.step()
    return seen


def two_forwards(side):
    """Before one backward. The second finds everything over."""
    for number in range(STEPS):
        side.backward(number, 10 + number)
        side.step()


def zeroed_in_place(side):
    side.set_to_none = False
    return losses(side)


def zeroed_after_forward(side):
    """While parameters may still be under way."""
    side.zeroes_after_forward = True
    return losses(side)


def zeroed_in_place_after_forward(side):
    side.zeroes_after_forward = True
    return zeroed_in_place(side)


def never_zeroed(side):
    """Averages are added to, and averaged again."""
    side.set_to_none = None
    return losses(side)


def a_step_left_out(side):
    """On all ranks: nothing is updated, and the next step has gradients of its own."""
    seen = []
    for number in range(2 * STEPS):
        seen.append(side.backward(number))
        if number % 3 == 1:
            side.zero_gradients()
        else:
            side.step()
    return seen


def gradients_are_read(side):
    """As by whoever logs their norms."""
    seen = []
    for number in range(STEPS):
        side.backward(number)
        seen.append(side.largest_gradient())
        side.step()
    return seen


@dataclass(frozen=True)
class Case:
    program: object = plain
    model: type = models.Chain
    find_unused: bool = False
    groups: bool = False
    is_exact: bool = True  # the same bits as `bucketed`
    has_twin: bool = True
    is_for_zero1: bool = True  # else refused


CASES = {
    "plain": Case(losses),
    "other way round": Case(losses, models.OtherWayRound),
    "unused": Case(losses, models.Unused, find_unused=True),
    "accumulation": Case(accumulation),
    "accumulation in the middle": Case(accumulation_in_the_middle),
    "clipping": Case(clipping, has_twin=False),
    "clipping by norm": Case(clipping_by_norm, is_exact=False),
    "learning rates": Case(learning_rates),
    "groups": Case(learning_rates, groups=True),
    "evaluation": Case(evaluation_in_between),
    "evaluation before the step": Case(evaluation_before_the_step),
    "two forwards": Case(two_forwards, has_twin=False),
    "zeroed in place": Case(zeroed_in_place, has_twin=False),
    "zeroed after forward": Case(zeroed_after_forward, has_twin=False),
    "zeroed in place after forward": Case(zeroed_in_place_after_forward, has_twin=False),
    "never zeroed": Case(never_zeroed, has_twin=False, is_for_zero1=False),
    "a step left out": Case(a_step_left_out, has_twin=False),
    "gradients are read": Case(gradients_are_read, has_twin=False, is_for_zero1=False),
    "checkpointing": Case(losses, models.Checkpointed),
    "tied": Case(losses, models.Tied),
    "shared": Case(losses, models.Shared),
    "attention": Case(losses, models.Attention),
}
