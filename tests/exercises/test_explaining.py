"""Wrong values are told by what they look like; calls are replayed without a place for messages."""

import numpy as np
import pytest

from dpcore.school.exercise.explaining import Origin, explained, sums_in_other_ways
from dpcore.school.exercise.judging import Wrong, need_same, need_to_end, need_values
from dpcore.school.exercise.replay import replay
from dpcore.school.exercise.student_comm import Call

TERMS = [np.random.default_rng(rank).standard_normal(60) for rank in range(3)]
SUM = sum(TERMS)
CHUNKS = [slice(0, 20), slice(20, 40), slice(40, 60)]


def with_chunks(changes, right=SUM):
    found = right.copy()
    for chunk, values in changes.items():
        found[CHUNKS[chunk]] = values[CHUNKS[chunk]]
    return found


AS_SUMS = {
    "they are still this rank's own": TERMS[1],
    "they are those of rank 2 alone": TERMS[2],
    "they are the means over 3 ranks, and not the sums": SUM / 3,
    "they are 2 times the right ones: added twice?": 2 * SUM,
    "they are minus the right ones": -SUM,
    "rank 0's are missing": TERMS[1] + TERMS[2],
    "rank 0's are missing and rank 1's are in it 2 times": 2 * TERMS[1] + TERMS[2],
    "they have 0.5 times rank 0's, 0.25 times rank 1's, 0.25 times rank 2's": (
        TERMS[0] / 2 + TERMS[1] / 4 + TERMS[2] / 4
    ),
    "they are all zero": np.zeros(60),
    "they are the right ones in reverse order": SUM[::-1],
    "they are the right ones in the wrong places": np.roll(SUM, 7),
    "they are those of the call before": TERMS[0] * TERMS[1],
    "chunk 2: still this rank's own": with_chunks({2: TERMS[1]}),
    "chunk 0: rank 2's are missing; chunk 1: those of rank 0 alone": with_chunks(
        {0: TERMS[0] + TERMS[1], 1: TERMS[0]}
    ),
    "chunk 0: what belongs into chunk 1": with_chunks({0: np.roll(SUM, -20)}),
    "they are right to 3e-04 of the largest: was a type of 16 bits used?": (
        SUM.astype(np.float16).astype(np.float64)
    ),
    "": np.random.default_rng(9).standard_normal(60),
}
AS_MEANS = {
    "they are still this rank's own": TERMS[1],
    "they are still this rank's own, divided by 3": TERMS[1] / 3,
    "they are those of rank 0 alone": TERMS[0],
    "they are the sums over 3 ranks, and not the means": SUM,
    "they are a third of the right ones: averaged twice?": SUM / 9,
    "they are half of the right ones": SUM / 6,
    "rank 2's are missing": (TERMS[0] + TERMS[1]) / 3,
}


@pytest.mark.parametrize(
    ("says", "found", "right"),
    [pytest.param(says, found, SUM, id=f"sum: {says}") for says, found in AS_SUMS.items()]
    + [pytest.param(says, one, SUM / 3, id=f"mean: {says}") for says, one in AS_MEANS.items()],
)
def test_wrong_values_say_what_they_are(says, found, right):
    origin = Origin(TERMS, 1, {"those of the call before": TERMS[0] * TERMS[1]})
    assert explained(found, right, origin) == says


def test_without_an_origin_a_multiple_is_still_told():
    assert explained(3 * SUM, SUM, Origin()) == "they are 3 times the right ones"
    assert explained(SUM[:1] * 3, SUM[:1], Origin()) == ""  # one number is a multiple of any other


def test_a_step_that_is_too_long_is_told():
    begin, step = TERMS[0], 0.01 * TERMS[1]
    said = explained(begin + 2 * step, begin + step, Origin(before=begin))
    assert said == "as steps from where they began, they are 2 times the right ones"


def test_what_is_in_flight_is_named():
    found = np.where(np.arange(60) < 20, np.nan, SUM)
    assert explained(found, SUM, Origin(TERMS, 0)).startswith(
        "20 of 60 elements are not a number. A tensor in flight is none until wait()"
    )


def test_values_are_named_with_the_first_that_is_wrong():
    right = {"weight": SUM / 3, "bias": SUM[:4] / 3}
    terms = [{"weight": term, "bias": term[:4]} for term in TERMS]
    with pytest.raises(Wrong) as refusal:
        need_values({"weight": SUM / 3, "bias": SUM[:4]}, right, "step 2", 1e-9, Origin(terms, 0))
    assert str(refusal.value) == (
        f"step 2, bias: they are the sums over 3 ranks, and not the means; element 0 is "
        f"{SUM[0]:.6g}, and {SUM[0] / 3:.6g} is right"
    )


def test_another_type_is_no_other_order():
    terms = [term.astype(np.float32) for term in TERMS]
    right = terms[0] + terms[1] + terms[2]
    double = sum(term.astype(np.float64) for term in terms)
    for found, says in (
        (double, "the tensor is of type float64, and float32 is right"),
        (double.astype(np.float32), "added in double precision, and rounded at the end"),
        (terms[2] + terms[1] + terms[0], "the last bits differ: ranks were added in the order 2,"),
        (np.nextafter(right, np.inf, dtype=np.float32), "added in another order"),
    ):
        with pytest.raises(Wrong) as refusal:
            need_same(found, right, "part of rank 0", sums_in_other_ways(terms))
        assert says in str(refusal.value)
    need_same(right.copy(), right, "part of rank 0")


# ---- replayed calls -----------------------------------------------------------------------------


def program(rank, world, text):
    """``send>`` to the right, ``recv<`` from the left, ``begin>``: a send that returns at once,
    ``wait``: for the last of these."""
    calls, begun = [], -1
    for number, word in enumerate(text.split()):
        name, peer = word.rstrip("<>"), (rank + (1 if word[-1] == ">" else -1)) % world
        if name == "begin":
            begun = number
        if name == "wait":
            calls.append(Call("wait", -1, 0, begun, 0.0, number))
        else:
            kind = "send" if name == "begin" else name
            calls.append(Call(kind, peer, 0, number if name == "begin" else -1, 0.0, number))
    return calls


@pytest.mark.parametrize(
    ("programs", "stopped", "steps"),
    [
        (["send> recv<"] * 3, {0, 1, 2}, 0),  # all send first
        (["begin> wait recv<"] * 3, {0, 1, 2}, 0),  # which is the same
        (["recv< send>"] * 3, {0, 1, 2}, 0),
        (["begin> recv< wait"] * 3, set(), 1),
        (["begin> recv< wait"] * 2 + ["recv< send>"], set(), 2),
        (["send> recv<", "recv< send>", "recv< send>"], set(), 3),  # one after the other
        (["send>", "recv< recv<", ""], {1}, 1),
        (["begin> recv< wait begin> recv< wait"] * 4, set(), 2),
    ],
)
def test_ranks_that_all_send_first_stand_still_where_nothing_is_kept(programs, stopped, steps):
    calls = [program(rank, len(programs), text) for rank, text in enumerate(programs)]
    found = replay(calls)
    assert (set(found.stopped), found.steps) == (stopped, steps)
    if stopped:
        with pytest.raises(Wrong, match=f"rank {min(stopped)} in (send|recv|wait)"):
            need_to_end([[list(call) for call in of_rank] for of_rank in calls])
