"""What schedules cost, against the closed formulas for n ranks and S bytes."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest

from dpcore import _C, reference


def log2_up(world):
    return (world - 1).bit_length()


def log2_down(world):
    return world.bit_length() - 1


def folded(world, steps, share):
    """An algorithm for powers of two, with a step of a whole buffer on either side elsewhere."""
    core = 1 << log2_down(world)
    extra = 0 if core == world else 2
    return steps(core) + extra, share(core) + extra


# (steps, bytes that pass one after the other as a share of S) for n ranks
PRICES = {
    ("all_reduce", "one_shot"): lambda n: (1, n - 1),
    ("all_reduce", "two_shot"): lambda n: (2, Fraction(2 * (n - 1), n)),
    ("all_reduce", "ring"): lambda n: (2 * (n - 1), Fraction(2 * (n - 1), n)),
    ("all_reduce", "recursive_doubling"): lambda n: folded(n, log2_up, log2_up),
    ("all_reduce", "halving_doubling"): lambda n: folded(
        n, lambda p: 2 * log2_up(p), lambda p: Fraction(2 * (p - 1), p)
    ),
    ("all_reduce", "tree"): lambda n: (2 * log2_up(n), 2 * log2_up(n)),
    ("all_reduce", "hierarchical"): lambda n: (2, Fraction(2 * (n - 1), n)),  # on one host
    ("reduce_scatter", "direct"): lambda n: (1, Fraction(n - 1, n)),
    ("reduce_scatter", "ring"): lambda n: (n - 1, Fraction(n - 1, n)),
    ("reduce_scatter", "halving_doubling"): lambda n: (log2_up(n), Fraction(n - 1, n)),
    ("reduce_scatter", "hierarchical"): lambda n: (1, Fraction(n - 1, n)),
    ("all_gather", "direct"): lambda n: (1, Fraction(n - 1, n)),
    ("all_gather", "ring"): lambda n: (n - 1, Fraction(n - 1, n)),
    ("all_gather", "recursive_doubling"): lambda n: (log2_up(n), Fraction(n - 1, n)),
    ("all_gather", "bruck"): lambda n: (log2_up(n), Fraction(n - 1, n)),
    ("all_gather", "hierarchical"): lambda n: (1, Fraction(n - 1, n)),
    ("broadcast", "direct"): lambda n: (1, n - 1),
    ("broadcast", "two_shot"): lambda n: (2, Fraction(2 * (n - 1), n)),
    ("broadcast", "ring"): lambda n: (5 * n - 2, Fraction(5 * n - 2, 4 * n)),
    ("broadcast", "tree"): lambda n: (log2_up(n), log2_up(n)),
    ("broadcast", "hierarchical"): lambda n: (1, n - 1),
    ("reduce", "direct"): lambda n: (1, n - 1),
    ("reduce", "two_shot"): lambda n: (2, Fraction(2 * (n - 1), n)),
    ("reduce", "tree"): lambda n: (log2_up(n), log2_up(n)),
    ("reduce", "hierarchical"): lambda n: (1, n - 1),
    ("gather", "direct"): lambda n: (1, Fraction(n - 1, n)),
    ("gather", "tree"): lambda n: (log2_up(n), Fraction(n - 1, n)),
    ("scatter", "direct"): lambda n: (1, Fraction(n - 1, n)),
    ("scatter", "tree"): lambda n: (log2_up(n), Fraction(n - 1, n)),
    ("all_to_all", "direct"): lambda n: (1, Fraction(n - 1, n)),
    ("all_to_all", "bruck"): lambda n: (
        log2_up(n),
        Fraction(sum(j.bit_count() for j in range(n)), n),
    ),
}
# Their formulas for any n would say more about folding than about them.
POWERS_OF_TWO_ONLY = [("reduce_scatter", "halving_doubling"), ("all_gather", "recursive_doubling")]


@pytest.mark.parametrize(("collective", "algorithm"), PRICES)
def test_steps_and_bytes_are_those_of_the_closed_formula(collective, algorithm):
    for world in range(2, 65):
        if (collective, algorithm) in POWERS_OF_TWO_ONLY and world != 1 << log2_up(world):
            continue
        steps, share = PRICES[collective, algorithm](world)
        chunk, element_bytes = 64, 4  # divisible by every number of chunks a buffer is cut in
        cuts_buffer = collective in ("all_reduce", "broadcast", "reduce")
        count = chunk * world if cuts_buffer else chunk
        plan = _C.schedule(algorithm, collective, world)
        cost = _C.schedule_cost(plan, count, element_bytes)
        whole = chunk * world * element_bytes
        assert (cost["steps"], Fraction(cost["critical_bytes"], whole)) == (steps, share), world
        assert sum(cost["sent_bytes"]) == sum(cost["received_bytes"])
        assert cost["max_bytes_per_rank"] == max(cost["sent_bytes"] + cost["received_bytes"])
        if algorithm in ("ring", "two_shot") and collective == "all_reduce":
            assert cost["sent_bytes"] == [share * whole] * world
            assert cost["received_bytes"] == [share * whole] * world


def test_reduced_bytes_are_priced_too():
    plan = _C.schedule("recursive_doubling", "all_reduce", 8)
    assert _C.schedule_cost(plan, 100, 4)["critical_reduced_bytes"] == 3 * 400


@pytest.mark.parametrize("count", [0, 1, 3, 10, 1001])
@pytest.mark.parametrize("chunks", [1, 2, 3, 7, 64])
def test_chunks_tile_the_buffer_as_in_numpy(count, chunks):
    bounds = [_C.chunk_range(count, chunks, index) for index in range(chunks)]
    parts = np.array_split(np.arange(count), chunks)
    assert [end - begin for begin, end in bounds] == [len(part) for part in parts]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == count
    assert all(left[1] == right[0] for left, right in itertools.pairwise(bounds))


def test_uneven_chunks_are_priced_by_their_own_size():
    cost = _C.schedule_cost(_C.schedule("two_shot", "all_reduce", 4), 10, 1)  # 3 + 3 + 2 + 2
    # First to the owners of the other chunks, then the own chunk to three ranks.
    assert cost["sent_bytes"] == [7 + 9, 7 + 9, 8 + 6, 8 + 6]
    assert _C.schedule_cost(_C.schedule("ring", "all_reduce", 4), 0, 4)["critical_bytes"] == 0


def test_every_algorithm_has_a_formula():
    known = {(kind, name) for kind in reference.ALGORITHMS for name in _C.algorithms_of(kind)}
    assert set(PRICES) == known
