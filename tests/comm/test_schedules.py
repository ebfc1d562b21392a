"""Schedules: the compiled lists, their twins in Python, and the proof of both.

After a deliberate change of an algorithm, ``python tests/comm/test_schedules.py`` writes the
golden plans anew; read the diff.
"""

from __future__ import annotations

import functools
import operator
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dpcore import _C, reference
from dpcore.reference import Move, Schedule

GOLDEN = Path(__file__).parent.parent / "golden" / "schedules"
ALL = [(kind, name) for kind, names in reference.ALGORITHMS.items() for name in names]
ROOTED = ("broadcast", "reduce", "gather", "scatter")
REDUCING = ("all_reduce", "reduce", "reduce_scatter")

every_algorithm = pytest.mark.parametrize(("collective", "algorithm"), ALL)


def roots(collective, world):
    if collective not in ROOTED:
        return [0]
    return range(world) if world <= 9 else [0, world // 2, world - 1]


def compiled(plan: Schedule):
    return _C.Schedule(
        plan.algorithm,
        plan.collective,
        plan.world,
        plan.chunks,
        list(plan.moves),
        root=plan.root,
        ordered=plan.ordered,
    )


def is_proved(plan: Schedule) -> bool:
    """Whether the checker accepts it; the compiled one and the one in Python must agree."""
    try:
        _C.check_schedule(compiled(plan))
        accepted = True
    except Exception as error:
        assert type(error).__name__ == "Error", error
        accepted = False
    try:
        reference.check(plan)
        accepted_by_twin = True
    except reference.ScheduleError:
        accepted_by_twin = False
    assert accepted == accepted_by_twin, plan
    return accepted


def random_inputs(plan: Schedule, seed, part=3):
    """One array of small integers per rank; odd lengths where the algorithm cuts the buffer."""
    generator = np.random.default_rng(seed)
    parts = {"all_gather": 1, "gather": 1}.get(plan.collective, plan.world)
    uneven = 1 if plan.collective in ("all_reduce", "broadcast", "reduce") else 0
    return [generator.integers(-99, 99, part * parts + uneven) for _ in range(plan.world)]


def expected_outputs(plan: Schedule, inputs):
    """What the collective promises, without any schedule."""
    world, root = plan.world, plan.root
    total = functools.reduce(operator.add, inputs)
    joined = np.concatenate(inputs)

    def slices(array):
        return np.split(array, world)

    match plan.collective:
        case "all_reduce":
            return [total] * world
        case "reduce":
            return [total if rank == root else None for rank in range(world)]
        case "reduce_scatter":
            return slices(total)
        case "all_gather":
            return [joined] * world
        case "gather":
            return [joined if rank == root else None for rank in range(world)]
        case "broadcast":
            return [inputs[root]] * world
        case "scatter":
            return slices(inputs[root])
        case "all_to_all":
            return [np.concatenate([slices(a)[rank] for a in inputs]) for rank in range(world)]
    raise AssertionError(plan.collective)


def assert_right(plan: Schedule, seed):
    inputs = random_inputs(plan, seed)
    for got, want in zip(reference.run(plan, inputs), expected_outputs(plan, inputs), strict=True):
        if want is None:
            assert got is None
        else:
            np.testing.assert_array_equal(got, want)


# --- the lists --------------------------------------------------------------------------------


@pytest.mark.parametrize("collective", reference.ALGORITHMS)
def test_both_languages_know_the_same_algorithms(collective):
    assert _C.algorithms_of(collective) == reference.algorithms_of(collective)


@every_algorithm
def test_compiled_list_equals_its_twin_and_is_proved(collective, algorithm):
    for world in range(1, 65):
        for root in roots(collective, world):
            plan = reference.make_schedule(algorithm, collective, world, root)
            fast = _C.schedule(algorithm, collective, world, root)
            assert tuple(fast.moves) == plan.moves
            assert (fast.algorithm, fast.collective, fast.world, fast.chunks) == (
                plan.algorithm,
                plan.collective,
                plan.world,
                plan.chunks,
            )
            assert (fast.root, fast.ordered) == (plan.root, plan.ordered)
            _C.check_schedule(fast)
            assert _C.is_ordered(fast) == fast.ordered


@every_algorithm
def test_reference_executor_gives_what_the_collective_promises(collective, algorithm):
    for world in [*range(1, 10), 16, 17]:
        for root in roots(collective, world):
            plan = reference.make_schedule(algorithm, collective, world, root)
            reference.check(plan)
            assert_right(plan, seed=world)


@every_algorithm
def test_plans_are_those_in_the_golden_files(collective, algorithm):
    assert golden_file(collective, algorithm).read_text() == golden_text(collective, algorithm)


def golden_file(collective, algorithm):
    return GOLDEN / f"{collective}_{algorithm}.txt"


def golden_text(collective, algorithm):
    root = 1 if collective in ROOTED else 0
    plans = [reference.make_schedule(algorithm, collective, world, root) for world in (2, 3, 4)]
    return "\n".join(reference.describe(plan) for plan in plans)


# --- the order of summation -------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", reference.algorithms_of("all_reduce"))
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_all_ranks_get_the_same_bits_and_ordered_ones_those_of_rank_order(algorithm, dtype):
    for world in range(1, 10):
        generator = np.random.default_rng(world)
        inputs = [generator.standard_normal(101).astype(dtype) for _ in range(world)]
        plan = reference.make_schedule(algorithm, "all_reduce", world)
        outputs = reference.run(plan, inputs)
        for output in outputs:
            np.testing.assert_array_equal(output, outputs[0])
        if plan.ordered:
            wide = [array.astype(np.float32) for array in inputs]
            in_rank_order = functools.reduce(operator.add, wide).astype(dtype)
            np.testing.assert_array_equal(outputs[0], in_rank_order)


@pytest.mark.parametrize("collective", REDUCING)
def test_mean_is_scaled_once(collective):
    for algorithm in reference.algorithms_of(collective):
        for world in (1, 2, 4, 8):  # where 1 / world is exact
            plan = reference.make_schedule(algorithm, collective, world)
            inputs = [array.astype(np.float64) for array in random_inputs(plan, seed=5)]
            means = reference.run(plan, inputs, "mean")
            for mean, total in zip(means, expected_outputs(plan, inputs), strict=True):
                if total is not None:
                    np.testing.assert_array_equal(mean, total / world)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64])
def test_a_mean_of_integers_wraps_and_is_rounded_toward_zero(dtype):
    """Any algorithm divides once, at the end: with division on the way the bits would differ."""
    for world in (2, 3, 5, 8):
        dice = np.random.default_rng(world)
        info = np.iinfo(dtype)
        inputs = [dice.integers(info.min, info.max, 40, dtype, True) for _ in range(world)]
        sums = functools.reduce(operator.add, inputs).tolist()
        wanted = [abs(n) // world * (1 if n >= 0 else -1) for n in sums]
        for algorithm in reference.algorithms_of("all_reduce"):
            plan = reference.make_schedule(algorithm, "all_reduce", world)
            for output in reference.run(plan, inputs, "mean"):
                assert output.dtype == dtype and output.tolist() == wanted
    with pytest.raises(TypeError, match="booleans have no mean"):
        reference.run(plan, [array > 0 for array in inputs], "mean")


@every_algorithm
def test_a_chunk_is_completed_by_reduction_before_anyone_copies_it(collective, algorithm):
    """Where the mean's scale is folded in: nothing is scaled twice, and nothing is left out."""
    for world in range(2, 18):
        plan = _C.schedule(algorithm, collective, world)
        scaled = set()
        last_step_of_scaling = {}
        flags = _C.completing_moves(plan)
        assert len(flags) == len(plan.moves)
        for (step, src, dst, chunk, reduce), completes in zip(plan.moves, flags, strict=True):
            assert not completes or reduce
            if completes:
                assert last_step_of_scaling.setdefault((dst, chunk), step) == step
                scaled.add((dst, chunk))
            elif collective in REDUCING and not reduce:
                assert (src, chunk) in scaled
                scaled.add((dst, chunk))
        assert {chunk for _, chunk in scaled} == set(range(plan.chunks)) or (
            collective not in REDUCING
        )


# --- the checker ------------------------------------------------------------------------------


def mutate(plan: Schedule, kind: str, dice: random.Random) -> Schedule:
    moves = list(plan.moves)
    i = dice.randrange(len(moves))
    move = moves[i]
    match kind:
        case "drop":
            del moves[i]
        case "duplicate":
            moves.insert(i, move)
        case "flip":
            moves[i] = move._replace(reduce=not move.reduce)
        case "src" | "dst":
            moves[i] = move._replace(**{kind: dice.randrange(plan.world)})
        case "chunk":
            moves[i] = move._replace(chunk=dice.randrange(plan.chunks))
        case "swap":
            j = dice.randrange(len(moves))
            moves[i] = move._replace(step=moves[j].step)
            moves[j] = moves[j]._replace(step=move.step)
            moves.sort(key=lambda m: m.step)
        case "shuffle":
            dice.shuffle(moves)
    return replace(plan, moves=tuple(moves))


@every_algorithm
def test_mutants_are_rejected_or_harmless(collective, algorithm):
    dice = random.Random(f"{collective} {algorithm}")
    verdicts = Counter()
    for trial in range(160):
        world = dice.randrange(2, 9)
        root = dice.choice(list(roots(collective, world)))
        plan = reference.make_schedule(algorithm, collective, world, root)
        kind = ("drop", "duplicate", "flip", "src", "dst", "chunk", "swap", "shuffle")[trial % 8]
        mutant = mutate(plan, kind, dice)
        if sorted(mutant.moves) == list(plan.moves):
            continue  # the dice gave the same move again, or the order within a step changed
        if is_proved(mutant):
            assert kind not in ("drop", "duplicate"), "no move of these plans is dispensable"
            assert_right(mutant, seed=trial)
            verdicts["harmless"] += 1
        else:
            verdicts["rejected"] += 1
    assert verdicts["rejected"] > 60, verdicts
    assert verdicts["rejected"] > verdicts["harmless"], verdicts


def one_shot_of_three(**changes):
    plan = reference.make_schedule("one_shot", "all_reduce", 3)
    return replace(plan, **changes)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (one_shot_of_three(world=0), "at least one rank"),
        (one_shot_of_three(root=3), "root 3 is not a rank"),
        (one_shot_of_three(chunks=0), "at least one chunk"),
        (one_shot_of_three(chunks=2), "chunk 1 of rank 0 lacks the contribution of rank 1"),
        (one_shot_of_three(collective="all_to_all"), "has 1 chunks and must have 9"),
        (one_shot_of_three(collective="barrier"), "a barrier moves no data"),
        (one_shot_of_three(collective="broadcast"), "this collective has no reduction"),
        (one_shot_of_three(moves=()), "at the end, chunk 0 of rank 0 lacks"),
        (one_shot_of_three(moves=(Move(-1, 0, 1, 0, True),)), "the step is negative"),
        (one_shot_of_three(moves=(Move(0, 3, 1, 0, True),)), "no such source"),
        (one_shot_of_three(moves=(Move(0, 0, -1, 0, True),)), "no such destination"),
        (one_shot_of_three(moves=(Move(0, 0, 1, 1, True),)), "no such chunk"),
        (one_shot_of_three(moves=(Move(0, 1, 1, 0, True),)), "a rank sends to itself"),
        (
            one_shot_of_three(moves=(Move(1, 0, 1, 0, True), Move(0, 1, 0, 0, True))),
            r"move 1 \(step 0, rank 1 -> rank 0, chunk 0, reduce\): moves must be sorted",
        ),
        (one_shot_of_three(moves=(Move(0, 0, 1, 0, True),) * 2), "rank 0 would be added twice"),
        (one_shot_of_three(moves=(Move(0, 0, 1, 0, False),) * 2), "copied into twice"),
        (
            one_shot_of_three(moves=(Move(0, 0, 1, 0, True), Move(0, 2, 1, 0, False))),
            "both copied and reduced",
        ),
        (
            replace(
                reference.make_schedule("direct", "broadcast", 3), moves=(Move(0, 1, 2, 0, False),)
            ),
            "rank 1 does not hold this chunk yet",
        ),
        (
            replace(reference.make_schedule("ring", "all_reduce", 3), ordered=True),
            "calls itself ordered",
        ),
        (
            # Every contribution is added at once, but those of ranks 1 and 2 have changed places.
            replace(
                reference.make_schedule("direct", "reduce", 3),
                moves=(
                    Move(0, 1, 2, 0, False),
                    Move(0, 2, 1, 0, False),
                    Move(1, 1, 0, 0, True),
                    Move(1, 2, 0, 0, True),
                ),
            ),
            "calls itself ordered",
        ),
    ],
)
def test_the_first_mistake_is_named(plan, message):
    with pytest.raises(Exception, match=message) as raised:
        _C.check_schedule(compiled(plan))
    assert type(raised.value).__name__ == "Error"
    with pytest.raises(reference.ScheduleError):
        reference.check(plan)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("spiral", "all_reduce", 4), "one_shot, two_shot, ring"),
        (("ring", "barrier", 4), "moves no data"),
        (("ring", "all_reduce", 0), "a schedule for 0 ranks"),
        (("tree", "broadcast", 4, 4), "root 4 is not a rank"),
    ],
)
def test_what_does_not_exist_is_unsupported(arguments, message):
    with pytest.raises(Exception, match=message) as raised:
        _C.schedule(*arguments)
    assert type(raised.value).__name__ == "Unsupported"
    with pytest.raises(ValueError):
        reference.make_schedule(*arguments)


if __name__ == "__main__":
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for collective, algorithm in ALL:
        golden_file(collective, algorithm).write_text(golden_text(collective, algorithm))
