"""Weights, gradients and steps that one rank changes for itself."""

import copy

import torch
from torch import nn

from tests.mistakes.here import Net, loss_of, update
from tests.mistakes.museum.exhibit import mistake

GITHUB = "https://github.com"
DIFFER = r"(?i)differ"
RANK = r"rank [01]"
ONE_OF = r"(features|head)\.(weight|bias)"
HEAD = r"head\.weight"


def prepared(here, **settings):
    model = here.wrap(Net())
    return model, here.optimizer(model, **settings)


def train(here, model, optimizer, before_step=lambda step: None, after_step=lambda step: None):
    for step in here.steps:
        before_step(step)
        update(model, optimizer, here.batch(step))
        after_step(step)
        yield


@mistake(
    f"{GITHUB}/vllm-project/speculators/pull/926", "warn", RANK, ONE_OF, DIFFER, by=3,
    remedy="load on all ranks, or before wrapping",
)  # fmt: skip
def weights_loaded_on_one_rank(here):
    """Rank 0 loads a checkpoint after the model was wrapped."""
    model, optimizer = prepared(here)
    if here.rank == 0:
        model.module.load_state_dict(Net(seed=2).state_dict())
    yield from train(here, model, optimizer)


@mistake(
    f"{GITHUB}/intelligent-machine-learning/dlrover/pull/1034", "warn", RANK, ONE_OF, DIFFER, by=7,
    remedy="all ranks load the same file",
)  # fmt: skip
def each_rank_loads_its_own_file(here):
    """When training resumes, each rank loads the checkpoint that it has written itself."""
    model, optimizer = prepared(here)

    def resume(step):
        if step == 4:
            model.load_state_dict(
                {name: value + here.rank for name, value in model.state_dict().items()}
            )

    yield from train(here, model, optimizer, resume)


@mistake(
    f"{GITHUB}/meta-pytorch/torchrec/pull/1866", "warn", RANK, ONE_OF, DIFFER, by=3,
    remedy="initialise before wrapping",
)  # fmt: skip
def initialised_after_wrapping(here):
    """`reset_parameters` runs after the model was wrapped, with the seed of the rank."""
    model, optimizer = prepared(here)
    torch.manual_seed(here.rank)
    for part in (model.module.features, model.module.head):
        part.reset_parameters()
    yield from train(here, model, optimizer)


@mistake(
    f"{GITHUB}/iCog-Labs-Dev/PC-Transformers/pull/135", "warn", RANK, HEAD, DIFFER, by=9,
    remedy="edit on all ranks, or broadcast the result",
)  # fmt: skip
def data_edited_on_one_rank(here):
    """Rank 1 edits `p.data` by a local rule."""
    model, optimizer = prepared(here)

    def edit(step):
        if step == 3 and here.rank == 1:
            model.module.head.weight.data.mul_(1.5)

    yield from train(here, model, optimizer, after_step=edit)


@mistake(
    f"{GITHUB}/microsoft/nni/pull/5242", "warn", RANK, HEAD, DIFFER, by=9,
    remedy="clamp on all ranks",
)  # fmt: skip
def clamp_on_one_rank(here):
    """The clamp of a critic's weights is under `if rank == 0:`."""
    model, optimizer = prepared(here)

    def clamp(step):
        if step >= 3 and here.rank == 0:
            with torch.no_grad():
                model.module.head.weight.clamp_(-0.01, 0.01)

    yield from train(here, model, optimizer, after_step=clamp)


@mistake(
    f"{GITHUB}/horovod/horovod/issues/1398", "warn", RANK, ONE_OF, DIFFER, by=5,
    remedy="draw the noise with the same seed on all ranks",
)  # fmt: skip
def noise_on_weights(here):
    """Each rank perturbs the weights with its own random numbers."""
    model, optimizer = prepared(here)
    randomness = here.own_randomness()

    def perturb(step):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=randomness), alpha=0.01)

    yield from train(here, model, optimizer, after_step=perturb)


@mistake(
    f"{GITHUB}/meta-pytorch/opacus/pull/196", "warn", RANK, ONE_OF, DIFFER, by=5,
    remedy="add noise before gradients are averaged, or with the same seed on all ranks",
)  # fmt: skip
def noise_on_gradients(here):
    """Each rank adds its own noise to gradients that are averaged already."""
    model, optimizer = prepared(here)
    randomness = here.own_randomness()
    for step in here.steps:
        optimizer.zero_grad()
        loss_of(model, here.batch(step)).backward()
        for parameter in model.parameters():
            parameter.grad.add_(torch.randn(parameter.shape, generator=randomness), alpha=0.01)
        optimizer.step()
        yield


@mistake(
    f"{GITHUB}/Lightning-AI/pytorch-lightning/issues/6328", "warn", RANK, ONE_OF, DIFFER, by=7,
    remedy="clip by the same threshold on all ranks",
)  # fmt: skip
def clip_by_a_local_threshold(here):
    """Gradients are clipped by a bound that follows the loss of each rank."""
    model, optimizer = prepared(here)
    for step in here.steps:
        optimizer.zero_grad()
        loss = loss_of(model, here.batch(step))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01 * (1 + here.rank) * (1 + loss.item()))
        optimizer.step()
        yield


@mistake(
    f"{GITHUB}/ecmwf/WeatherGenerator/issues/2724", "warn", RANK, r"(?i)step", by=6,
    remedy="all-reduce the decision: all ranks step, or none",
)  # fmt: skip
def a_step_skipped_on_one_rank(here):
    """Rank 1 does not like its loss and leaves out `optimizer.step()`."""
    model, optimizer = prepared(here)
    for step in here.steps:
        optimizer.zero_grad()
        loss_of(model, here.batch(step)).backward()
        if not (step == 3 and here.rank == 1):
            optimizer.step()
        yield


@mistake(
    f"{GITHUB}/pytorch/pytorch/issues/136009", "warn", RANK, by=7,
    remedy="all ranks begin with the same scale and unscale averaged gradients",
)  # fmt: skip
def scaler_of_one_rank(here):
    """The GradScaler of rank 1 begins with another scale."""
    model, optimizer = prepared(here)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (8 + 4 * here.rank))
    for step in here.steps:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, here.batch(step))).backward()
        scaler.step(optimizer)
        scaler.update()
        yield


@mistake(
    f"{GITHUB}/NVIDIA-NeMo/Automodel/pull/2468", "warn", RANK, r"(?i)step", by=6,
    remedy="the same number of steps on all ranks",
)  # fmt: skip
def a_step_twice_on_one_rank(here):
    """Rank 1 calls `optimizer.step()` in its logging branch, too."""
    model, optimizer = prepared(here)

    def again(step):
        if step == 3 and here.rank == 1:
            optimizer.step()

    yield from train(here, model, optimizer, after_step=again)


@mistake(
    f"{GITHUB}/pytorch/pytorch/issues/47175", "warn", RANK, by=7,
    remedy="`optimizer.zero_grad()` on all ranks",
)  # fmt: skip
def zero_grad_forgotten_on_one_rank(here):
    """`zero_grad` is under a condition that rank 1 does not meet, so it adds up gradients."""
    model, optimizer = prepared(here)
    for step in here.steps:
        if here.rank == 0 or step < 3:
            optimizer.zero_grad()
        loss_of(model, here.batch(step)).backward()
        optimizer.step()
        yield


@mistake(
    f"{GITHUB}/lucidrains/ema-pytorch/issues/9", "warn", RANK, ONE_OF, DIFFER, by=6,
    remedy="keep the average of weights on all ranks, or broadcast what is copied back",
)  # fmt: skip
def average_of_weights_copied_back_on_one_rank(here):
    """Rank 0 keeps a moving average of the weights, and copies it into the model."""
    model, optimizer = prepared(here)
    average = copy.deepcopy(model.module)

    def follow(step):
        if here.rank == 0:
            with torch.no_grad():
                for mean, value in zip(average.parameters(), model.parameters(), strict=True):
                    mean.lerp_(value, 0.5)
            if step == 3:
                model.module.load_state_dict(average.state_dict())

    yield from train(here, model, optimizer, after_step=follow)


@mistake(
    f"{GITHUB}/m2lines/Samudra/pull/326", "silent",
    remedy="`dp.check(model, optimizer, average)` names the first difference",
)  # fmt: skip
def average_of_weights_that_differs(here):
    """The moving average begins before the model is wrapped, from each rank's own values."""
    module = Net(seed=here.rank)
    average = copy.deepcopy(module)
    model = here.wrap(module)

    def follow(step):
        with torch.no_grad():
            for mean, value in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(value, 0.1)

    yield from train(here, model, here.optimizer(model), after_step=follow)
