"""Modes, NaN and buffers of one rank."""

import math

import torch

from tests.mistakes.here import Net, loss_of, update
from tests.mistakes.museum.exhibit import mistake

GITHUB = "https://github.com"
RANK = r"rank 1"
MODE = r"eval|train"
FINITE = r"(?i)nan|not finite|infinit|\binf\b"


def train(here, model, optimizer, before_step=lambda step: None, change=lambda step, batch: batch):
    for step in here.steps:
        before_step(step)
        update(model, optimizer, change(step, here.batch(step)))
        yield


@mistake(
    f"{GITHUB}/fartashf/vsepp/issues/4", "warn", RANK, MODE, by=6,
    remedy="`model.train()` on all ranks after evaluation",
)  # fmt: skip
def batch_norm_in_eval_on_one_rank(here):
    """Rank 1 evaluates and forgets `model.train()`."""
    model = here.wrap(Net(buffers=True))

    def evaluate(step):
        if step == 4 and here.rank == 1:
            model.module.eval()

    yield from train(here, model, here.optimizer(model), evaluate)


@mistake(
    f"{GITHUB}/wolny/pytorch-3dunet/issues/53", "warn", RANK, MODE, by=6,
    remedy="`model.train()` on all ranks after evaluation",
)  # fmt: skip
def dropout_in_eval_on_one_rank(here):
    """One layer is left in eval mode, by a hook that only rank 1 runs."""
    model = here.wrap(Net(dropout=0.5))
    torch.manual_seed(here.rank)

    def freeze(step):
        if step == 4 and here.rank == 1:
            model.module.drop.eval()

    yield from train(here, model, here.optimizer(model), freeze)


def spoiled_by(value, here):
    def spoil(step, batch):
        if step == 4 and here.rank == 1:
            batch[0][0, 0] = value
        return batch

    return spoil


@mistake(
    f"{GITHUB}/ecmwf/WeatherGenerator/pull/2718", "warn", RANK, FINITE, by=5,
    remedy="look at that rank's batch; skip on all ranks",
)  # fmt: skip
def nan_in_one_batch(here):
    """A NaN in the data of rank 1 reaches the gradients of all ranks."""
    model = here.wrap(Net())
    change = spoiled_by(math.nan, here)
    yield from train(here, model, here.optimizer(model), change=change)


@mistake(
    f"{GITHUB}/ai2cm/ace/pull/850", "warn", RANK, FINITE, by=5,
    remedy="look at that rank's loss; skip on all ranks",
)  # fmt: skip
def infinite_loss_on_one_rank(here):
    """A logarithm of zero on rank 1 makes gradients infinite."""
    model = here.wrap(Net())
    optimizer = here.optimizer(model)
    for step in here.steps:
        optimizer.zero_grad()
        loss = loss_of(model, here.batch(step))
        if step == 4 and here.rank == 1:
            loss = loss * math.inf
        loss.backward()
        optimizer.step()
        yield


@mistake(
    f"{GITHUB}/pytorch/pytorch/issues/1206", "warn", r"rank [01]", FINITE, r"running_", by=7,
    remedy="find the batch that made it; `reset_running_stats()`",
)  # fmt: skip
def nan_in_a_buffer(here):
    """A running mean of rank 0 is NaN, and each forward sends it to all ranks."""
    model = here.wrap(Net(buffers=True))

    def spoil(step):
        if step == 4 and here.rank == 0:
            model.module.norm.running_mean[0] = math.nan

    yield from train(here, model, here.optimizer(model), spoil)


@mistake(
    f"{GITHUB}/facebookresearch/moco/issues/41", "silent",
    remedy="`dp.check(model)` names the buffer; average buffers before evaluation",
)  # fmt: skip
def buffers_that_differ(here):
    """With `forward_sync_buffers=False`, each rank evaluates with running means of its own."""
    model = here.wrap(Net(buffers=True), broadcast_buffers=False)
    yield from train(here, model, here.optimizer(model))


@mistake(
    f"{GITHUB}/huggingface/transformers/issues/31412", "silent",
    remedy="`torch.manual_seed(seed + rank)` after the model is made; a note of `dp.check(model)`",
)  # fmt: skip
def the_same_dropout_on_all_ranks(here):
    """All ranks have one seed, so they drop the same units."""
    model = here.wrap(Net(dropout=0.5))
    torch.manual_seed(0)
    yield from train(here, model, here.optimizer(model))
