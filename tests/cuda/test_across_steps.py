"""Schedules across steps on a GPU: the programs of tests/across_steps, made there."""

import torch

import dpcore
from tests.across_steps.programs import CASES
from tests.across_steps.test_equal import gives_what_bucketed_gives
from tests.cuda.test_mapped import with_device


def every_program(comm):
    """Kernels of torch may add in another order when they run again."""
    with torch.device(comm.device):
        for name, case in CASES.items():
            try:
                gives_what_bucketed_gives(comm, case, is_exact=False)
            except Exception as error:
                raise AssertionError(f"rank {comm.rank}: {name}") from error
    return len(CASES)


def test_over_nccl_in_a_world_of_one(comm):
    assert every_program(comm) == len(CASES)


def test_two_ranks_over_mapped_memory():
    assert (
        dpcore.spawn(with_device, 2, every_program, mode="processes", timeout=120.0)
        == [len(CASES)] * 2
    )
