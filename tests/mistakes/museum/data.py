"""What ranks average: the same data, unequal shares, metrics."""

import contextlib

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.mistakes.here import Net, loss_of, update
from tests.mistakes.museum.exhibit import mistake

GITHUB = "https://github.com"


def prepared(here):
    model = here.wrap(Net())
    return model, here.optimizer(model)


@mistake(
    f"{GITHUB}/binbinao/physicsnemo-from-zero-to-one/issues/143", "note",
    r"(?i)same (data|batch|inputs)", by=10,
    remedy="`DistributedSampler`, or another seed on each rank",
)  # fmt: skip
def the_same_data_on_all_ranks(here):
    """There is no DistributedSampler, so all ranks compute the same gradients."""
    model, optimizer = prepared(here)
    for step in here.steps:
        update(model, optimizer, here.batch(step, of=0))
        yield


def dataset():
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(16, 4, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True))


@mistake(
    f"{GITHUB}/pytorch/pytorch/issues/31771", "silent",
    remedy="`sampler.set_epoch(epoch)`; print the first indices of two epochs",
)  # fmt: skip
def set_epoch_forgotten(here):
    """Without `sampler.set_epoch`, each epoch has the same order."""
    model, optimizer = prepared(here)
    sampler = DistributedSampler(dataset(), here.world, here.rank, shuffle=True)
    for _ in range(len(here.steps) // 2):
        for batch in DataLoader(dataset(), batch_size=4, sampler=sampler):
            update(model, optimizer, batch)
            yield


@mistake(
    f"{GITHUB}/NVlabs/LongLive/issues/71", "silent",
    remedy="the same `seed=` for the sampler of all ranks; count distinct indices",
)  # fmt: skip
def samplers_with_other_seeds(here):
    """The sampler of each rank shuffles by another seed, so shares overlap."""
    model, optimizer = prepared(here)
    sampler = DistributedSampler(dataset(), here.world, here.rank, shuffle=True, seed=here.rank)
    for epoch in range(len(here.steps) // 2):
        sampler.set_epoch(epoch)
        for batch in DataLoader(dataset(), batch_size=4, sampler=sampler):
            update(model, optimizer, batch)
            yield


@mistake(
    f"{GITHUB}/ORNL/HydraGNN/pull/116", "note", r"(?i)batch|rows|samples", r"weighted", by=10,
    remedy="`with model.weighted(len(x)):`",
)  # fmt: skip
def mean_over_unequal_batches(here):
    """Rank 1 has fewer samples, and each of them counts more."""
    model, optimizer = prepared(here)
    for step in here.steps:
        update(model, optimizer, here.batch(step, rows=4 if here.rank == 0 else 2))
        yield


@mistake(
    f"{GITHUB}/huggingface/transformers/issues/34242", "silent",
    remedy="`with model.weighted(tokens):`; the right mean has all tokens",
)  # fmt: skip
def mean_over_local_tokens(here):
    """Batches have one shape, but ranks mask different numbers of tokens."""
    model, optimizer = prepared(here)
    for step in here.steps:
        optimizer.zero_grad()
        x, y = here.batch(step)
        mask = (torch.arange(4) < 3 - here.rank).unsqueeze(1)
        ((model(x) - y).square() * mask).sum().div(mask.sum()).backward()
        optimizer.step()
        yield


@mistake(
    f"{GITHUB}/tatsu-lab/alpaca_farm/issues/57", "note", r"(?i)micro-batch|backward", by=10,
    remedy="the same number of micro-batches, or weights by samples",
)  # fmt: skip
def more_micro_batches_on_one_rank(here):
    """Rank 1 adds up two micro-batches in a step, rank 0 three."""
    model, optimizer = prepared(here)
    for step in here.steps:
        optimizer.zero_grad()
        micros = 3 - here.rank
        for micro in range(micros):
            waits = model.no_sync() if micro + 1 < micros else contextlib.nullcontext()
            with waits:
                (loss_of(model, here.batch(3 * step + micro)) / micros).backward()
        optimizer.step()
        yield


@mistake(
    f"{GITHUB}/NVIDIA/Megatron-LM/pull/1998", "silent",
    remedy="clip after backward; compare with one rank and the whole batch",
)  # fmt: skip
def clipping_before_averaging(here):
    """A hook clips each gradient of each rank before it is averaged."""
    module = Net()
    for parameter in module.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    model = here.wrap(module)
    optimizer = here.optimizer(model)
    for step in here.steps:
        update(model, optimizer, here.batch(step))
        yield


@mistake(
    f"{GITHUB}/pytorch/examples/issues/905", "silent",
    remedy="all-reduce sums and counts, then divide",
)  # fmt: skip
def a_mean_of_metrics(here):
    """The accuracy of a mean over ranks with different numbers of samples."""
    model, optimizer = prepared(here)
    for step in here.steps:
        update(model, optimizer, here.batch(step))
        with torch.no_grad():
            x, y = here.batch(step, rows=2 + here.rank)
            accuracy = ((model.module(x) > 0) == (y > 0)).float().mean()
        here.all_reduce(accuracy).div_(here.world)
        yield


@mistake(
    f"{GITHUB}/modelscope/ms-swift/pull/10081", "silent",
    remedy="gather with a backward, or scale; compare with one rank",
)  # fmt: skip
def gathered_without_gradients(here):
    """A contrastive loss over gathered embeddings, of which only the own ones have gradients."""
    model, optimizer = prepared(here)
    for step in here.steps:
        optimizer.zero_grad()
        own = model(here.batch(step)[0])
        everything = here.all_reduce(own.detach().clone())
        nn.functional.mse_loss(own, everything - own.detach()).backward()
        optimizer.step()
        yield


@mistake(
    f"{GITHUB}/Lightning-AI/pytorch-lightning/issues/20404", "already", r"rank [01]", by=11,
    remedy="`drop_last=True`, or `with model.join():`",
)  # fmt: skip
def one_batch_more_on_one_rank(here):
    """Rank 1 has one batch more than rank 0, which has left."""
    model, optimizer = prepared(here)
    for step in range(len(here.steps) - 1 + here.rank):
        update(model, optimizer, here.batch(step))
        yield


@mistake(
    f"{GITHUB}/Lightning-AI/pytorch-lightning/issues/379", "already", r"rank [01]", by=11,
    remedy="all-reduce the decision to stop",
)  # fmt: skip
def early_stop_on_one_rank(here):
    """Rank 0 stops by its own loss; rank 1 goes on."""
    model, optimizer = prepared(here)
    for step in here.steps:
        if here.rank == 0 and step == 4:
            return
        update(model, optimizer, here.batch(step))
        yield
