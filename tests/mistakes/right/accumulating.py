"""Accumulation, sums over tokens, scalers, checkpoints of activations, uneven inputs."""

import contextlib

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.mistakes.here import Net, loss_of, update
from tests.mistakes.right.known import right


def prepared(here, *, kind=torch.optim.SGD, **settings):
    model = here.wrap(Net())
    return model, here.optimizer(model, kind, **settings)


@right("tcp", "priority", "dear", "zero1", "torch")
def accumulation(here):
    """All but the last micro-batch under ``no_sync``."""
    model, optimizer = prepared(here, momentum=0.9)
    for step in here.steps:
        optimizer.zero_grad()
        with model.no_sync():
            for micro in range(3):
                (loss_of(model, here.batch(4 * step + micro)) / 4).backward()
        (loss_of(model, here.batch(4 * step + 3)) / 4).backward()
        optimizer.step()
        yield


@right("tcp")
def a_penalty_of_its_own(here):
    """A second backward is this rank's own, and the same on all."""
    model, optimizer = prepared(here)
    for step in range(20):  # beyond what is patiently awaited
        optimizer.zero_grad()
        loss_of(model, here.batch(step)).backward()
        (0.01 * sum(p.square().sum() for p in model.parameters())).backward()
        optimizer.step()
        yield


@right()
def accumulation_with_a_short_window(here):
    """The last window of an epoch is shorter, and synchronises."""
    model, optimizer = prepared(here)
    for epoch in range(5):
        for i in range(6):
            steps = (i + 1) % 4 == 0 or i + 1 == 6
            with contextlib.nullcontext() if steps else model.no_sync():
                (loss_of(model, here.batch(6 * epoch + i)) / 4).backward()
            if steps:
                optimizer.step()
                optimizer.zero_grad()
                yield


@right()
def accumulation_whose_rest_is_thrown_away(here):
    """What is left at the end of an epoch is zeroed, and no optimizer takes it."""
    model, optimizer = prepared(here)
    for epoch in range(5):
        optimizer.zero_grad()
        for i in range(5):
            steps = (i + 1) % 2 == 0
            with contextlib.nullcontext() if steps else model.no_sync():
                loss_of(model, here.batch(5 * epoch + i)).backward()
            if steps:
                optimizer.step()
                optimizer.zero_grad()
                yield


@right()
def accumulation_that_averages_each_time(here):
    """Without ``no_sync``: three backwards are averaged, and one step taken."""
    model, optimizer = prepared(here)
    for step in here.steps:
        for micro in range(3):
            (loss_of(model, here.batch(3 * step + micro)) / 3).backward()
        optimizer.step()
        model.zero_grad(set_to_none=False)
        yield


@right("tcp")
def sum_over_tokens(here):
    """As fairseq does: a sum on each rank, and gradients times world / tokens of all ranks."""
    model, optimizer = prepared(here, kind=torch.optim.Adam, lr=0.01)
    for step in here.steps:
        x, y = here.batch(step)
        mask = (torch.arange(4) < 3 - here.rank).unsqueeze(1)
        tokens = here.all_reduce(mask.sum().float())
        optimizer.zero_grad()
        ((model(x) - y).square() * mask).sum().backward()
        for parameter in model.parameters():
            parameter.grad.mul_(here.world / tokens)
        optimizer.step()
        yield


@right()
def unequal_batches_as_a_sum(here):
    """Batches differ in size; the sum is scaled by the samples of all ranks before backward."""
    model, optimizer = prepared(here)
    for step in here.steps:
        rows = 4 + step % 2 if here.rank == 0 else 3
        samples = here.all_reduce(torch.tensor(float(rows)))
        x, y = here.batch(step, rows)
        optimizer.zero_grad()
        ((model(x) - y).square().sum() * (here.world / samples)).backward()
        optimizer.step()
        yield


@right("tcp")
def scaler_with_infinities_on_purpose(here):
    """The scale begins too large, so the first steps overflow and are left out on all ranks."""
    model, optimizer = prepared(here)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-30)
    for step in here.steps:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, here.batch(step))).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        yield


@right()
def scaler_with_a_fused_optimizer(here):
    """A fused optimizer is called with infinite gradients, and leaves the step out by itself."""
    model, optimizer = prepared(here, kind=torch.optim.AdamW, lr=0.01, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-30)
    for step in here.steps:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, here.batch(step))).backward()
        scaler.step(optimizer)
        scaler.update()
        yield


@right()
def a_bad_batch_left_out_together(here):
    """All ranks hear that a loss is NaN; none steps, and the gradients are thrown away."""
    model, optimizer = prepared(here)
    for step in here.steps:
        optimizer.zero_grad()
        loss = loss_of(model, here.batch(step))
        if step == 4 and here.rank == 1:
            loss = loss * float("nan")
        loss.backward()
        if not here.all_reduce(loss.detach().clone()).isnan():
            optimizer.step()
        yield


@right()
def a_bad_norm_left_out(here):
    """As Megatron does: the norm of the averaged gradients decides, the same on all ranks."""
    model, optimizer = prepared(here)
    for step in here.steps:
        optimizer.zero_grad()
        loss = loss_of(model, here.batch(step))
        if step == 4 and here.rank == 1:
            loss = loss * float("inf")
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if norm.isfinite():
            optimizer.step()
        yield


@right()
def dummy_batches(here):
    """A rank without data multiplies its loss by zero."""
    model, optimizer = prepared(here)
    for step in here.steps:
        optimizer.zero_grad()
        has_data = (step + here.rank) % 3 != 0
        (loss_of(model, here.batch(step)) * float(has_data)).backward()
        optimizer.step()
        yield


@right()
def checkpoints_of_activations(here):
    """Parts of forward run again in backward."""

    class Checkpointed(Net):
        def forward(self, x):
            return self.head(checkpoint(self.features, x, use_reentrant=False).tanh())

    model = here.wrap(Checkpointed())
    optimizer = here.optimizer(model)
    for step in here.steps:
        update(model, optimizer, here.batch(step))
        yield


@right("tcp")
def uneven_inputs_with_join(here):
    """Rank 1 has three batches more, within ``join()``."""
    model = here.wrap(Net())
    optimizer = here.optimizer(model)
    with model.join():
        for step in range(6 + 3 * here.rank):
            update(model, optimizer, here.batch(step))
            yield


@right("tcp", "zero1")
def unequal_batches_with_weights(here):
    """A mean on each rank, within ``weighted``."""
    model, optimizer = prepared(here)
    for step in here.steps:
        rows = 4 + step % 2 if here.rank == 0 else 3
        x, y = here.batch(step, rows)
        optimizer.zero_grad()
        with model.weighted(rows):
            nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        yield
