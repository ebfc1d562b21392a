"""What torch DDP trains wrongly without a word and is right here: the gradients are those of one
process that has the whole batch. More of them: two backwards after one forward (test_exact.py),
another dtype (test_silent_faults.py)."""

import pytest
import torch
from torch import nn

import dpcore
from tests.data_parallel.models import Small, batch, part, seeded

WORLD = 2


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = seeded(
            lambda: nn.Sequential(
                nn.Conv2d(3, 4, 3, dtype=torch.float64),
                nn.Tanh(),
                nn.Conv2d(4, 6, 3, dtype=torch.float64),
                nn.AdaptiveAvgPool2d(1),
                nn.Flatten(),
            )
        )

    def forward(self, x):
        return self.layers(x)


def images(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 3, 8, 8, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("as_view", (True, False), ids=("views", "copies"))
@pytest.mark.parametrize("set_to_none", (True, False))
@pytest.mark.parametrize("before", (torch.contiguous_format, torch.channels_last))
def test_another_memory_format_after_wrapping(as_view, set_to_none, before):
    """torch: buckets have the layout of the constructor, gradients another one, and numbers change
    places."""
    formats = [torch.contiguous_format, torch.channels_last]
    after = formats[1 - formats.index(before)]

    def body(comm):
        module = Images().to(memory_format=before)
        alone = Images().to(memory_format=before)
        model = dpcore.DataParallel(module, comm=comm, gradient_as_bucket_view=as_view)
        for step in range(4):
            if step == 1:
                module.to(memory_format=after)
                alone.to(memory_format=after)
            model.zero_grad(set_to_none=set_to_none)
            alone.zero_grad(set_to_none=set_to_none)
            x = images(step)
            model(part(x, comm)).square().mean().backward()
            alone(x).square().mean().backward()
            for mine, other in zip(module.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, other.grad)

    dpcore.spawn(body, WORLD, mode="threads")


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag, self.table = seeded(
            lambda: (
                nn.EmbeddingBag(20, 3, sparse=True, mode="sum", dtype=torch.float64),
                nn.Embedding(20, 3, dtype=torch.float64),
            )
        )

    def forward(self, words):
        return (self.bag(words) * self.table(words).sum(1)).square()


def test_a_sparse_embedding_bag_beside_an_embedding():
    """torch: takes nn.EmbeddingBag for dense, and averages some of its rows."""

    def body(comm):
        model = dpcore.DataParallel(Words(), comm=comm)
        alone = Words()
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            words = torch.randint(20, (4, 5), generator=generator)
            model.zero_grad()
            alone.zero_grad()
            model(part(words, comm)).mean().backward()
            alone(words).mean().backward()
            assert model.module.bag.weight.grad.is_sparse
            for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(mine.grad.to_dense(), other.grad.to_dense())

    dpcore.spawn(body, WORLD, mode="threads")


def test_a_state_that_is_assigned_raises_until_refresh():
    """torch: averages gradients of parameters that nobody has any more, and ranks drift apart."""

    def body(comm):
        model = dpcore.DataParallel(Small(), comm=comm)
        x, _ = batch(0)
        model(part(x, comm)).sum().backward()
        model.module.load_state_dict(Small(seed=8).state_dict(), assign=True)
        with pytest.raises(dpcore.Error, match=r"first\.weight, .*replaced.*refresh"):
            model(part(x, comm))
        model.refresh()
        alone = Small(seed=8)
        alone(x).mean().backward()
        model(part(x, comm)).mean().backward()
        for mine, other in zip(model.module.parameters(), alone.parameters(), strict=True):
            if other.grad is not None:
                torch.testing.assert_close(mine.grad, other.grad)

    dpcore.spawn(body, WORLD, mode="threads")
