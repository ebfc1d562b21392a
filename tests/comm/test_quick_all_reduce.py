"""An all-reduce without options has a quick way of its own into the core, and refuses no less."""

import pytest
import torch

import dpcore


def with_none(comm):
    for option in ("timeout", "priority", "layout"):
        with pytest.raises(TypeError, match=f"{option}: expected .*, not None"):
            comm.all_reduce(torch.ones(2), **{option: None})


def test_none_is_not_taken_for_the_default_of_a_number():
    dpcore.spawn(with_none, 1, mode="threads")
