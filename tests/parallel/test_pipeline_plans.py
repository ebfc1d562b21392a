"""Plans: what is in them, what they cost, and which of them are none."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dpcore as dp
from dpcore.parallel.pipeline_plans import Action, PipelinePlan


def plan_of(*rows):
    return PipelinePlan.from_csv("\n".join(rows), "mine")


@given(st.integers(1, 6), st.integers(1, 12))
@settings(max_examples=40, deadline=None)
def test_the_bubble_is_the_textbooks(ranks, microbatches):
    for name in ("GPipe", "1F1B"):
        plan = dp.pipeline_plan(name, stages=ranks, microbatches=microbatches)
        assert plan.price().bubble == pytest.approx((ranks - 1) / (microbatches + ranks - 1))
        many = name == "GPipe"
        live = [microbatches if many else min(ranks - r, microbatches) for r in range(ranks)]
        assert plan.live() == live


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_interleaving_shortens_it(ranks, chunks, rounds):
    count = ranks * rounds
    plan = dp.pipeline_plan(
        "Interleaved1F1B", stages=ranks * chunks, microbatches=count, ranks=ranks
    )
    assert plan.rank_of == {stage: stage % ranks for stage in range(ranks * chunks)}
    assert plan.price().bubble == pytest.approx((ranks - 1) / (chunks * count + ranks - 1))


def test_stages_that_differ_and_links_take_their_time():
    plan = dp.pipeline_plan("GPipe", stages=2, microbatches=2)
    price = plan.price(forward=[1, 3], backward=[2, 6], link=0.5)
    first, second = price.spans
    assert first[0] == (Action(0, "F", 0), 0, 1)
    assert [begin for _, begin, _ in second] == [1.5, 4.5, 7.5, 13.5]
    assert price.seconds == 13.5 + 6 + 0.5 + 2
    with pytest.raises(dp.Unsupported, match="forward has 3 times for 2 stages"):
        plan.price(forward=[1, 2, 3])
    for wrong in ({"link": "1gbit,50us"}, {"forward": -1}, {"backward": [1, float("nan")]}):
        with pytest.raises(dp.Unsupported, match=f"price: {next(iter(wrong))}=.* 0 or more"):
            plan.price(**wrong)
    with pytest.raises(dp.Unsupported, match="at most 1"):
        plan.price(weight=2)


def test_the_picture_has_no_unit():
    plan = dp.pipeline_plan("1F1B", stages=2, microbatches=3)
    assert plan.price(0.001, 0.002).draw() == plan.price(100, 200).draw() == plan.price().draw()
    free = plan.price(0, 0)
    assert (free.seconds, free.bubble, free.draw()) == (0, 0, "no pass takes any time")


def test_a_backward_in_two_parts_fills_the_bubble():
    whole = plan_of("0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1")
    parts = plan_of("0F0,0F1,0I0,0I1,0W0,0W1", "1F0,1I0,1F1,1I1,1W0,1W1")
    assert parts.price().seconds < whole.price().seconds
    assert parts.live() == [2, 2]
    assert "I0" in str(parts) and "W1" in str(parts)


def test_csv_there_and_back(tmp_path):
    plan = dp.pipeline_plan("Interleaved1F1B", stages=4, microbatches=4, ranks=2)
    path = tmp_path / "mine.csv"
    path.write_text(plan.to_csv())
    read = dp.pipeline_plan(path)
    assert (read.name, read.actions) == ("mine", plan.actions)
    overlapped = plan_of("0F0,,0F1,0B0,,0B1", "1F0,1B0,(1F1;1B1)OVERLAP_F_B".replace("1B0,", "", 0))
    assert [str(action) for action in overlapped.actions[1]] == ["1F0", "1B0", "1F1", "1B1"]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (["0F0,0B0", "1B0,1F0"], "rank 0 waits in 0B0 for 1B0 of rank 1; rank 1 waits in 1B0"),
        (["0F0,0B0,1B0", "1F0"], "stage 1 is on ranks"),
        (["0F0,0B0", "2F0,2B0"], r"numbered from 0, and not \[0, 2\]"),
        (["0F0,0B0,0F1", "1F0,1B0,1F1,1B1"], "stage 0 has F of micro-batch 1"),
        (["0F0,0I0", "1F0,1B0"], "needs F and B, or F, I and W"),
        (["0F0,0SEND_F0"], "'0SEND_F0' is not a pass"),
        ([""], "numbered from 0"),
    ],
)
def test_what_is_no_plan_is_refused(rows, said):
    with pytest.raises(dp.Unsupported, match=said):
        plan_of(*rows)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("2F2B",), "neither one of"),
        (("GPipe",), "needs stages= and microbatches="),
        (("GPipe", 4, 8, 2), "a stage on each rank; try Interleaved1F1B"),
        (("Interleaved1F1B", 5, 8, 2), "equally many stages"),
        (("Interleaved1F1B", 4, 5, 2), "take 4 or 6"),
        (("1F1B", 2, 0), "all must be positive"),
        (("1F1B", "2", 3), "stages: expected an integer, not '2'"),
        (("1F1B", 2, 2.5), "microbatches: expected an integer, not 2.5"),
    ],
)
def test_names_and_numbers_are_checked(arguments, said):
    name, *rest = arguments
    numbers = dict(zip(("stages", "microbatches", "ranks"), rest, strict=False))
    with pytest.raises((dp.Unsupported, TypeError), match=said):
        dp.pipeline_plan(name, **numbers)
