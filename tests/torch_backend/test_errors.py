"""Where ranks disagree: with Gloo a wrong sum, an abort or a hang; here an error on every rank."""

import re

import pytest
import torch
import torch.distributed as dist

import dpcore
from tests.ranks.groups import in_group


def reduce_and_wait(count, group):
    dist.all_reduce(torch.ones(count), group=group, async_op=True).wait()


def reduce_and_wait_for_the_future(count, group):
    dist.all_reduce(torch.ones(count), group=group, async_op=True).get_future().wait()


def gather(sizes, group):
    own = torch.ones(sizes[dist.get_rank()])
    dist.all_gather([torch.ones(size) for size in sizes], own, group=group)


# What rank 0 calls, what rank 1 calls, and what all are told.
DISAGREEMENTS = {
    "dtype": (
        lambda group: dist.all_reduce(torch.ones(4), group=group),
        lambda group: dist.all_reduce(torch.ones(4, dtype=torch.int32), group=group),
        "float32.*int32|int32.*float32",
    ),
    "operator": (
        lambda group: dist.all_reduce(torch.ones(4), group=group),
        lambda group: dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX, group=group),
        "sum.*max|max.*sum",
    ),
    "shape": (
        lambda group: dist.all_reduce(torch.ones(4), group=group),
        lambda group: dist.all_reduce(torch.ones(5), group=group),
        "4.*5|5.*4",
    ),
    "operation": (
        lambda group: dist.all_reduce(torch.ones(4), group=group),
        lambda group: dist.broadcast(torch.ones(4), 0, group=group),
        "all_reduce.*broadcast|broadcast.*all_reduce",
    ),
    "root": (
        lambda group: dist.broadcast(torch.ones(100_000), 0, group=group),
        lambda group: dist.broadcast(torch.ones(100_000), 1, group=group),
        "root",
    ),
    "parts": (
        lambda group: gather((2, 3), group),
        lambda group: gather((4, 3), group),
        "all_gather",
    ),
    "asynchronous": (
        lambda group: reduce_and_wait(4, group),
        lambda group: reduce_and_wait_for_the_future(5, group),
        "4.*5|5.*4",
    ),
}


def test_ranks_that_disagree_all_hear_of_it():
    """Each case in a group of its own, which it breaks."""

    def body():
        rank = dist.get_rank()
        for name, case in DISAGREEMENTS.items():
            group = dist.new_group()
            with pytest.raises(dpcore.Mismatch) as caught:
                case[rank](group)
            text = str(caught.value)
            assert re.search(case[2], text, re.DOTALL), (name, text)
            assert "rank 0" in text and "rank 1" in text, (name, text)
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == 2

    in_group(body, 2)


def test_a_message_of_another_type_or_size():
    def body():
        if dist.get_rank() == 0:
            dist.send(torch.ones(4, dtype=torch.int32), 1)
        else:
            with pytest.raises(dpcore.Mismatch, match="from rank 0"):
                dist.recv(torch.ones(4), 0)

    in_group(body, 2)


def test_the_debug_mode_of_torch_wraps_the_backend():
    """It compares shapes by a group of Gloo before the operation; ours is not reached then."""

    def body():
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [2.0] * 3
        parts = [torch.empty(2), torch.empty(2)]
        dist.all_gather(parts, torch.ones(2))
        with pytest.raises(RuntimeError, match="Detected mismatch between collectives"):
            dist.all_reduce(torch.ones(3 + dist.get_rank()))
        # What torch does not compare reaches us.
        with pytest.raises(dpcore.Mismatch, match="max"):
            op = dist.ReduceOp.MAX if dist.get_rank() else dist.ReduceOp.SUM
            dist.all_reduce(torch.ones(3), op)

    in_group(body, 2, debug="DETAIL")
