"""A part of torch's own suite over dpcore's backend; ``make conformance`` runs all of it."""

from pathlib import Path

import pytest

from tests.conformance import lists
from tests.ranks import python

ROOT = Path(__file__).resolve().parents[2]
WORLDS = (2, 4, 8)

# One test for each kind of operation. They take well under a second each.
PART = {
    2: [
        "test_DistributedDataParallelCPU_grad_is_view",
        "test_all_gather_coalesced_with_empty",
        "test_all_gather_object_subgroup",
        "test_all_reduce_coalesced_max_complex_unsupported",
        "test_all_reduce_sum_async",
        "test_barrier_timeout_full_group",
        "test_batch_isend_irecv_gloo_tags",
        "test_gather_checks",
        "test_get_future",
        "test_isend_autograd_profiler",
        "test_monitored_barrier_gloo_rank_0_timeout",
        "test_scatter_complex",
        "test_send_recv_any_source_torch_profiler",
        "test_sparse_all_reduce_sum",
    ],
    4: ["test_gather_object_subgroup", "test_new_subgroups_with_group_param"],
}


def run(*arguments):
    return python.run(
        *("-m", "tests.conformance", *arguments),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.parametrize("world", PART)
def test_a_part_of_the_suite_of_torch(world):
    assert set(PART[world]) <= lists.expected(world, False)
    result = run("--backend", "dpcore", "--world", str(world), "--only", *PART[world])
    assert result.returncode == 0, result.stdout + result.stderr[-4000:]


def test_the_driver_sees_a_test_that_fails():
    """A test that asks for more ranks than there are is skipped, and what is skipped has not
    passed."""
    result = run("--backend", "dpcore", "--only", "test_all_reduce_group_sum")
    assert result.returncode == 1 and "0 of 1 passed" in result.stdout, result.stdout


def test_the_lists_hold_what_the_control_run_found():
    assert [len(lists.expected(world, False)) for world in WORLDS] == [90, 93, 111]
    assert all(lists.expected(2, False) < lists.expected(world, False) for world in (4, 8))
    assert not lists.expected(2, True) & lists.expected(2, False)


def test_few_differences_and_each_with_a_reason():
    of_backend = lists.differences("dpcore", "torch")
    assert len(of_backend) <= 5
    assert all(len(reason.split()) >= 4 for reason in of_backend.values())
    assert set(of_backend) <= lists.expected(8, False)
