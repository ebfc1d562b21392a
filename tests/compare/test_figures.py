"""From rounds to figures, intervals and sentences: rounds that are made up have known answers."""

import pytest

from dpcore.tools.compare.figures import figures_of, reference_of, verdicts
from dpcore.tools.compare.plan import contenders
from dpcore.tools.compare.training.bare import BY_DPCORE, BY_TORCH
from dpcore.tools.compare.training.ranks import ALONE

TWO = contenders(["torch", "default"])


def rounds(torch_ms, default_ms, alone=100.0, tails=(8.0, 1.0), count=15, drift=0.0):
    """Two ranks, one step a round; the second rank is quicker to compute and waits for longer."""
    made = []
    for number in range(count):
        slow = 1 + drift * number
        steps = {"torch": torch_ms(number), "dpcore": default_ms(number), ALONE: alone}
        steps |= {BY_TORCH: 20.0, BY_DPCORE: 5.0}
        waits = {"torch": tails[0] + 0.5, "dpcore": tails[1] + 0.5, ALONE: 0.5}
        waits |= {BY_TORCH: 0.0, BY_DPCORE: 0.0}
        made.append(
            {
                "seconds": {
                    n: [[v * slow / 1e3], [(v - 1) * slow / 1e3]] for n, v in steps.items()
                },
                "tails": {n: [[v * slow / 1e3], [(v + 3) / 1e3]] for n, v in waits.items()},
            }
        )
    return made


def test_a_difference_that_is_there():
    torch, default = figures_of(TWO, rounds(lambda n: 112.0 + n % 2, lambda n: 102.0 + n % 2))
    assert torch.ratio is None
    assert (torch.step.median, torch.alone.median) == pytest.approx((112.0, 100.0))
    assert torch.exposed.median == pytest.approx(8.0)
    assert torch.slowdown.median == pytest.approx(4.0)
    assert torch.overlap.median == pytest.approx(1 - 12 / 20)
    assert default.ratio.high < 1
    (said,) = verdicts([torch, default])
    assert said.startswith("default is faster than torch: its step takes 0.911 of torch's")
    assert "adds 2.00 ms (1.00 ms of it exposed, the rest slower computing)" in said
    assert "with torch it adds 12.0 ms (8.00 ms of it exposed" in said


def test_a_minute_that_is_slow_for_all_changes_no_ratio():
    drifting = figures_of(TWO, rounds(lambda n: 110.0, lambda n: 99.0, drift=0.2))[1]
    assert (drifting.ratio.low, drifting.ratio.high) == pytest.approx((0.9, 0.9))


def test_nothing_can_be_concluded():
    made = figures_of(TWO, rounds(lambda n: 110.0, lambda n: 110.0 + (-1) ** n * 5))
    (said,) = verdicts(made)
    assert "cannot be told apart" in said
    assert "nothing can be concluded from 15 rounds" in said
    assert "faster" not in said


def test_it_says_how_many_rounds_might_tell():
    noisy = figures_of(TWO, rounds(lambda n: 100.0, lambda n: 98.0 + (n % 5 - 2) * 2))
    (said,) = verdicts(noisy)
    assert "--rounds " in said
    assert 20 < int(said.partition("--rounds ")[2].split()[0]) < 1000


def test_too_few_rounds():
    (said,) = verdicts(figures_of(TWO, rounds(lambda n: 110.0, lambda n: 90.0, count=3)))
    assert "3 rounds are too few" in said


def test_an_overlap_that_nobody_can_know():
    wild = figures_of(TWO, rounds(lambda n: 110.0, lambda n: 100.0 + (-1) ** n * 8))[1]
    assert not wild.overlap_is_known


def test_an_overlap_below_0_is_explained():
    said = verdicts(figures_of(TWO, rounds(lambda n: 130.0, lambda n: 102.0)))
    assert len(said) == 2
    assert said[1] == (
        "torch's overlap is below 0: communication adds 30.0 ms to a step, and takes 20.0 ms with "
        "nothing beside it."
    )


def test_what_computes_something_else_says_so_with_its_loss():
    entrants = contenders(["torch", "local_sgd:4"])
    made = rounds(lambda n: 110.0, lambda n: 99.0)
    for one in made:
        for of in one.values():
            of["local_sgd:4"] = of.pop("dpcore")
    figures = figures_of(entrants, made, {"torch": 0.5, "local_sgd:4": 0.75})
    (said,) = verdicts(figures)
    assert "faster" in said and "Mind what it computes: ranks agree every 4 steps" in said
    assert "its loss at the end is 0.75, torch's 0.5" in said
    assert figures[1].overlap is None and figures[1].exposed is not None


def test_what_only_whole_steps_can_say():
    entrants = contenders(["torch", "zero1"])
    made = rounds(lambda n: 110.0, lambda n: 99.0)
    for one in made:
        for of in one.values():
            of["dpcore zero1"] = of.pop("dpcore")
    zero1 = figures_of(entrants, made)[1]
    assert zero1.exposed is zero1.slowdown is zero1.overlap is None
    assert sum(zero1.parts_ms.values()) == pytest.approx(99.0)


def test_whom_the_others_are_compared_with():
    assert reference_of(contenders(["default", "torch:1", "torch"])).name == "torch:1"
    assert reference_of(contenders(["sequential", "default"])).name == "sequential"
    (alone,) = figures_of(contenders(["torch"]), rounds(lambda n: 110.0, lambda n: 90.0))
    assert "nothing to compare" in verdicts([alone])[0]
