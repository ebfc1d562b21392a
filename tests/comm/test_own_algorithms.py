"""Algorithms of a program's own by FILE:NAME: what the loader takes, proves and refuses."""

import subprocess
import sys

import numpy as np
import pytest
import torch

import dpcore
from dpcore import reference
from dpcore.base.own_algorithm import OwnAlgorithm, is_own, schedule_of

MINE = """
import dpcore
from dpcore import reference


def exchange(world):
    \"\"\"Everyone sends everything to everyone.\"\"\"
    return [(0, a, b, 0, True) for a in range(world) for b in range(world) if a != b]


def in_two(world):
    moves = [(0, r, (r + 1 + s) % world, c, True)
             for s in range(world - 1) for r in range(world) for c in (1, 0)]
    return 2, moves


def core_schedule(world):
    return dpcore.Schedule("named", "all_reduce", world, 1, exchange(world))


def like_the_reference(world, root):
    return reference.make_schedule("ring", "all_reduce", world, root)


def half(world):
    return exchange(world)[:-1]


def powers_of_two(world):
    if world & (world - 1):
        raise ValueError(f"{world} is not a power of two")
    return exchange(world)


def for_four(world):
    return core_schedule(4)


def nothing(world):
    return None


def three_numbers(world):
    return [(0, 1, 0)]


gatherer = reference.make_schedule("ring", "all_gather", 3)
number = 3
"""
RIGHT = ("exchange", "in_two", "core_schedule", "like_the_reference")


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return lambda name: f"{path}:{name}"


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_what_a_function_may_return(mine, name, world):
    plan = schedule_of(mine(name), "all_reduce", world)
    assert plan.world == world and plan.collective == "all_reduce"
    reference.check(plan)
    inputs = [np.arange(7) + rank for rank in range(world)]
    for got in reference.run(plan, inputs):
        np.testing.assert_array_equal(got, sum(inputs))


def test_moves_in_any_order_are_sorted_as_the_reference_sorts_them():
    plan = reference.make_schedule("ring", "all_reduce", 4)
    shuffled = [*reversed(plan.moves)]
    assert schedule_of(lambda world: (4, shuffled), "all_reduce", 4).moves == plan.moves


def test_the_moves_of_a_schedule_stay_in_its_order():
    """Which is that in which ranks send."""
    moves = [(0, 1, 0, 0, True), (0, 0, 1, 0, True)]
    made = dpcore.Schedule("mine", "all_reduce", 2, 1, moves)
    assert [tuple(move) for move in schedule_of(made, "all_reduce", 2).moves] == moves


@pytest.mark.parametrize(
    ("name", "world", "says"),
    [
        ("half", 3, r":half for 3 ranks is wrong: rank 1 ends without a complete chunk 0"),
        ("powers_of_two", 6, r":powers_of_two for 6 ranks: mine\.py:\d+: ValueError: 6 is not a"),
        ("for_four", 3, r":for_four for 3 ranks: it is a schedule for 4 ranks$"),
        ("nothing", 2, r":nothing for 2 ranks: it returned a NoneType; return a dpcore\.Schedule"),
        ("three_numbers", 2, r"2 ranks: \(0, 1, 0\) is not a move \(step, src, dst, chunk, reduce"),
        ("gatherer", 3, r":gatherer for 3 ranks: it is for all_gather, not for all_reduce"),
        ("gatherer", 2, r"schedule for 3 ranks; pass a function of the number of ranks instead"),
        ("number", 2, r"a function of the number of ranks or a dpcore\.Schedule, not a int"),
        ("swing", 2, r"mine\.py has no 'swing'; it has .*for_four"),
    ],
)
def test_what_is_wrong_is_said_with_file_function_and_world(mine, name, world, says):
    with pytest.raises(dpcore.Unsupported, match=says):
        schedule_of(mine(name), "all_reduce", world)


def test_a_wrong_move_is_named():
    with pytest.raises(
        dpcore.Unsupported, match=r"for 2 ranks is wrong: Move\(step=0, src=0, dst=2, .*two differ"
    ):
        schedule_of(lambda world: [(0, 0, 2, 0, True)], "all_reduce", 2)


def test_names_are_those_of_the_program(mine):
    def swing(world):
        return []

    assert OwnAlgorithm(swing).name == "swing"
    assert OwnAlgorithm(mine("exchange")).name == mine("exchange")
    assert OwnAlgorithm(reference.make_schedule("ring", "all_reduce", 2)).name == "ring"
    assert not is_own("auto") and is_own(swing) and is_own("mine.py")
    assert schedule_of("ring", "all_gather", 3).collective == "all_gather"


def test_it_needs_no_compiled_code(mine):
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from dpcore.base.own_algorithm import schedule_of\n"
        f"print(len(schedule_of({mine('exchange')!r}, 'all_reduce', 3).moves))\n"
        "assert 'dpcore._C' not in sys.modules\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert out.stdout == "6\n", out.stderr


def test_an_algorithm_whose_comparison_calls_the_communicator():
    def body(comm):
        known = dpcore.algorithms_of("all_reduce")
        names = [name + way for name in known for way in ("", "/moves")]
        tensor, compares = torch.ones(4), []

        class Ring:
            def __call__(self, world):
                return dpcore.schedule("ring", "all_reduce", world).moves

            def __hash__(self):
                return id(self)

            def __eq__(self, other):
                if compares:
                    compares.clear()
                    for name in names:
                        comm.all_reduce(tensor, algorithm=name)
                return self is other

        for _ in range(2):
            comm.all_reduce(tensor, "mean", algorithm=Ring())
        compares.append(True)
        comm.all_reduce(tensor, "mean", algorithm=Ring())
        return tensor.unique().tolist()

    sums = 2 * len(dpcore.algorithms_of("all_reduce"))
    assert dpcore.spawn(body, 2, mode="threads") == [[2.0**sums]] * 2
