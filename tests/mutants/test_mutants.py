"""The tests are tested: every mutant fails a check of the contract, and the one that is for it.

DataParallel itself passes them all (tests/data_parallel/test_contract.py): what kills a mutant
is its mistake.
"""

import pytest

import dpcore
from tests.data_parallel import contract
from tests.mutants.mutants import MUTANTS

WORLD = 3

# The check that each has to fail, whatever else it fails.
KILLED_BY = {
    "never reduces": contract.trains_as_one_process_with_the_whole_batch,
    "sums": contract.trains_as_one_process_with_the_whole_batch,
    "averages twice": contract.trains_as_one_process_with_the_whole_batch,
    "reduces every other time": contract.trains_as_one_process_with_the_whole_batch,
    "forgets the last elements": contract.sends_every_gradient_once_per_step,
    "broadcasts nothing": contract.begins_with_the_values_of_rank_0,
    "begins with its own values": contract.begins_with_the_values_of_rank_0,
    "forgets buffers": contract.brings_buffers_of_rank_0_before_forward,
    "skips the last bucket": contract.sends_every_gradient_once_per_step,
    "waits for all before launching": contract.sends_while_backward_goes_on,
    "gradients are read in flight": contract.clips_what_is_averaged,
    "bucket order by rank": contract.pairs_gradients_by_parameter_and_not_by_arrival,
    "rebuild loses accumulated gradients": contract.adds_up_gradients_that_are_not_zeroed,
    "rebuilds by its own order": contract.pairs_gradients_by_parameter_and_not_by_arrival,
    "ignores no_sync": contract.averages_what_was_accumulated_under_no_sync,
    "never synchronises again": contract.averages_what_was_accumulated_under_no_sync,
    "never asks the optimizer": contract.no_step_with_gradients_that_are_missing,
    "looks at parameters once": contract.no_forward_with_a_parameter_that_nobody_averages,
    "compares shapes only": contract.no_model_that_differs,
    "hook on the parameter": contract.trains_as_one_process_with_the_whole_batch,
    "communicates nothing": contract.trains_as_one_process_with_the_whole_batch,
}


def test_every_mutant_has_its_check():
    assert set(KILLED_BY) == set(MUTANTS)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_killed(name):
    def body(comm):
        KILLED_BY[name](comm, MUTANTS[name])

    with pytest.raises((AssertionError, dpcore.Error)):
        dpcore.spawn(body, WORLD, mode="threads", timeout=2)
