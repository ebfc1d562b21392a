"""Where ranks disagree: with Gloo a wrong sum, an abort or a hang; here an error on every rank."""

import re

import pytest
import torch
import torch.distributed as dist

import dpcore
from tests.torch_backend.ranks import in_group

DISAGREEMENTS = {
    "dtype": (
        lambda: dist.all_reduce(torch.ones(4)),
        lambda: dist.all_reduce(torch.ones(4, dtype=torch.int32)),
        "float32.*int32|int32.*float32",
    ),
    "operator": (
        lambda: dist.all_reduce(torch.ones(4)),
        lambda: dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX),
        "sum.*max|max.*sum",
    ),
    "shape": (
        lambda: dist.all_reduce(torch.ones(4)),
        lambda: dist.all_reduce(torch.ones(5)),
        "4.*5|5.*4",
    ),
    "operation": (
        lambda: dist.all_reduce(torch.ones(4)),
        lambda: dist.broadcast(torch.ones(4), 0),
        "all_reduce.*broadcast|broadcast.*all_reduce",
    ),
    "root": (
        lambda: dist.broadcast(torch.ones(100_000), 0),
        lambda: dist.broadcast(torch.ones(100_000), 1),
        "root",
    ),
    "parts": (
        lambda: dist.all_gather([torch.ones(2), torch.ones(3)], torch.ones(2)),
        lambda: dist.all_gather([torch.ones(4), torch.ones(3)], torch.ones(3)),
        "all_gather",
    ),
    "asynchronous": (
        lambda: dist.all_reduce(torch.ones(4), async_op=True).wait(),
        lambda: dist.all_reduce(torch.ones(5), async_op=True).get_future().wait(),
        "4.*5|5.*4",
    ),
}


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_ranks_that_disagree_all_hear_of_it(name):
    first, second, words = DISAGREEMENTS[name]

    def body():
        rank = dist.get_rank()
        with pytest.raises(RuntimeError) as caught:
            (first if rank == 0 else second)()
        # A future holds the text of an error, and not its class.
        is_mismatch = isinstance(caught.value, dpcore.Mismatch)
        return is_mismatch or (name == "asynchronous" and rank == 1), str(caught.value)

    for is_mismatch, text in in_group(body, 2):
        assert is_mismatch, text
        assert re.search(words, text, re.DOTALL), text
        assert "rank 0" in text and "rank 1" in text


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
