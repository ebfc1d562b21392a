"""A part of torch's own tests of DDP with our class; ``make conformance-ddp`` runs all of them."""

from pathlib import Path

import pytest

from tests.conformance import lists
from tests.ranks import python

ROOT = Path(__file__).resolve().parents[2]

# One test for each feature. They take about a second each.
PART = [
    "test_ddp_apply_optim_in_backward_ignored_params",
    "test_ddp_broadcast_buffer_via_hook",
    "test_ddp_comm_hook_logging",
    "test_ddp_hook_parity_powerSGD",
    "test_ddp_multiple_nested_unused_params_error",
    "test_ddp_native_mixed_precision_ignored_params",
    "test_ddp_profiling_torch_profiler",
    "test_detect_ddp_is_actually_static",
    "test_output_unused_in_loss_dict_module",
    "test_post_localSGD_optimizer_parity",
    "test_skip_all_reduce_unused_parameters",
    "test_stateless_api_with_ddp",
]


@pytest.mark.parametrize("backend", ("gloo", "dpcore"))
def test_a_part_of_torchs_tests_of_ddp(backend):
    assert set(PART) <= lists.expected(2, True)
    command = ["-m", "tests.conformance", "--ddp", "dpcore", "--shim"]
    result = python.run(
        *(*command, "--backend", backend, "--only", *PART),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout + result.stderr[-4000:]


def test_few_differences_and_each_with_a_reason():
    of_class = lists.differences("gloo", "dpcore")
    assert len(of_class) <= 6
    assert all(len(reason.split()) >= 8 for reason in of_class.values())
    assert set(of_class) <= lists.expected(2, True) | lists.expected(2, False)
