"""Each program of the museum: how loudly, in which words and by which step its mistake is told."""

import re
from functools import cache

import pytest

from tests.mistakes.judging import of, problem
from tests.mistakes.museum import EXHIBITS
from tests.mistakes.running import over_dpcore

NOTES = [name for name, exhibit in EXHIBITS.items() if exhibit.grade == "note"]
# One or more of each part of the word, for the ways that carry it differently.
SOME = (
    "training_through_module",
    "no_sync_around_all",
    "learning_rate_of_one_rank",
    "weights_loaded_on_one_rank",
    "a_step_skipped_on_one_rank",
    "zero_grad_forgotten_on_one_rank",
    "batch_norm_in_eval_on_one_rank",
    "nan_in_one_batch",
    "set_epoch_forgotten",
)
# Groups of torch compare every 16th step. Under a schedule that goes across steps, an update is
# seen a step later.
LATER = {"torch": 32, "priority": 1, "dear": 1, "zero1": 1}
# What another way does not do, or does not do at once.
EXCEPT = {
    "torch": {"nan_in_one_batch"},  # NaN is looked for there only if the program asks for it
    "zero1": {"zero_grad_forgotten_on_one_rank"},  # an error of its own, before any warning
}


@cache
def told(way="shm", mistakes="warn", names=tuple(EXHIBITS), world=2):
    return over_dpcore({name: EXHIBITS[name].program for name in names}, way, mistakes, world)


@pytest.mark.parametrize("name", EXHIBITS)
def test_it_is_told(name):
    assert not problem(EXHIBITS[name], told()[name], loud="note")


@pytest.mark.parametrize("name", NOTES)
def test_a_note_is_a_warning_with_all(name):
    heard = told(mistakes="all", names=tuple(NOTES))[name]
    assert not problem(EXHIBITS[name], heard, loud="warn")


@pytest.mark.parametrize("way", ("tcp", "priority", "dear", "zero1", "gloo", "torch"))
@pytest.mark.parametrize("name", SOME)
def test_other_ways_tell_it(way, name):
    if name in EXCEPT.get(way, ()):
        assert not of(told(way, names=SOME)[name], "warn")
        return
    assert not problem(EXHIBITS[name], told(way, names=SOME)[name], "note", LATER.get(way, 0))


# The rank whose mistake it is, if there are three.
ODD = {
    "learning_rate_of_one_rank": 1,
    "weights_loaded_on_one_rank": 0,
    "data_edited_on_one_rank": 1,
    "a_step_skipped_on_one_rank": 1,
    "dropout_in_eval_on_one_rank": 1,
    "infinite_loss_on_one_rank": 1,
}


@pytest.mark.parametrize("name", ODD)
def test_of_three_ranks_the_odd_one_is_named(name):
    heard = told(names=tuple(ODD), world=3)[name]
    assert not problem(EXHIBITS[name], heard)
    first = of(heard, "warn", "raise")[0].text
    assert re.search(rf"rank {ODD[name]}\b", first), first


@pytest.mark.parametrize("name", ("training_through_module", "learning_rate_of_one_rank"))
def test_raise_makes_it_an_error(name):
    heard = told(mistakes="raise", names=SOME)[name]
    assert of(heard, "raise") and not of(heard, "warn")
    assert not problem(EXHIBITS[name], heard)


@pytest.mark.parametrize("name", SOME)
def test_ignore_says_nothing(name):
    assert not of(told(mistakes="ignore", names=SOME)[name], "raise", "warn", "note")


def test_the_museum_is_large_and_every_kind_has_a_public_address():
    assert len(EXHIBITS) >= 50
    for name, exhibit in EXHIBITS.items():
        assert exhibit.address.startswith("https://github.com/"), name
        assert exhibit.what.endswith("."), name
        assert exhibit.remedy, name
