"""Gradients that an optimizer takes although no rank has averaged them."""

import contextlib

from tests.mistakes.here import LONG, Net, loss_of, update
from tests.mistakes.museum.exhibit import mistake

GITHUB = "https://github.com"
AVERAGED = r"(?i)never averaged|not averaged|not sent"
MODULE = r"\.module|outside no_sync"
NO_SYNC = r"no_sync"


def prepared(here, **options):
    model = here.wrap(Net(), **options)
    return model, here.optimizer(model)


@mistake(
    f"{GITHUB}/jingyaogong/minimind/issues/853", "warn", AVERAGED, MODULE, by=4,
    remedy="call the wrapped model: `model(x)`",
)  # fmt: skip
def training_through_module(here):
    """Every forward goes through `model.module`."""
    model, optimizer = prepared(here)
    for step in here.steps:
        update(model.module, optimizer, here.batch(step))
        yield


@mistake(
    f"{GITHUB}/kohya-ss/sd-scripts/issues/924", "warn", AVERAGED, MODULE, by=24,
    remedy="unwrap for evaluation only, not in the loop",
)  # fmt: skip
def module_after_warm_up(here):
    """After three steps the program unwraps the model and trains the module."""
    model, optimizer = prepared(here)
    for step in range(LONG):
        update(model if step < 3 else model.module, optimizer, here.batch(step))
        yield


@mistake(
    f"{GITHUB}/moojink/openvla-oft/issues/160", "warn", AVERAGED, MODULE, by=4,
    remedy="let the wrapped `forward` call the method",
)  # fmt: skip
def a_method_of_the_module(here):
    """The loss comes from a method that only the bare module has."""
    model, optimizer = prepared(here)
    for step in here.steps:
        optimizer.zero_grad()
        x, y = here.batch(step)
        hidden = model.module.features(x).tanh()
        ((model.module.head(hidden) - y).square().mean() + model.module.penalty()).backward()
        optimizer.step()
        yield


@mistake(
    f"{GITHUB}/rosinality/swapping-autoencoder-pytorch/issues/22", "warn", AVERAGED, by=4,
    remedy="wrap each model and call the wrappers",
)  # fmt: skip
def one_of_two_models_through_its_module(here):
    """An encoder is called through its wrapper, its decoder through `.module`."""
    encoder = here.wrap(Net().features)
    decoder = here.wrap(Net().head)
    optimizers = [here.optimizer(model) for model in (encoder, decoder)]
    for step in here.steps:
        x, y = here.batch(step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        (decoder.module(encoder(x).tanh()) - y).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        yield


@mistake(
    f"{GITHUB}/HorizonRobotics/alf/pull/1804", "already", r"rank [01]", by=11,
    remedy="the same call on all ranks",
)  # fmt: skip
def module_on_one_rank(here):
    """Rank 1 trains its module while rank 0 uses the wrapper and waits."""
    model, optimizer = prepared(here)
    for step in here.steps:
        update(model.module if here.rank == 1 else model, optimizer, here.batch(step))
        yield


@mistake(
    f"{GITHUB}/Haian-Jin/LVSM/pull/22", "warn", AVERAGED, NO_SYNC, by=20,
    remedy="leave `no_sync` for the last micro-batch of a window",
)  # fmt: skip
def no_sync_around_all(here):
    """Every micro-batch of a window of two runs under `no_sync`."""
    model, optimizer = prepared(here)
    for step in range(LONG):
        optimizer.zero_grad()
        with model.no_sync():
            for micro in range(2):
                (loss_of(model, here.batch(2 * step + micro)) / 2).backward()
        optimizer.step()
        yield


@mistake(
    f"{GITHUB}/modelscope/FunASR/pull/3472", "warn", AVERAGED, NO_SYNC, by=3,
    remedy="synchronise when `(i + 1) % window == 0`, as the step does",
)  # fmt: skip
def no_sync_off_by_one(here):
    """The first micro-batch of a window is averaged instead of the last."""
    model, optimizer = prepared(here)
    window = 2
    for i in range(window * len(here.steps)):
        waits = contextlib.nullcontext() if i % window == 0 else model.no_sync()
        with waits:
            (loss_of(model, here.batch(i)) / window).backward()
        if (i + 1) % window == 0:
            optimizer.step()
            optimizer.zero_grad()
            yield


@mistake(
    f"{GITHUB}/karpathy/build-nanogpt/pull/30", "warn", AVERAGED, by=20,
    remedy="decide before forward; use `no_sync()` around forward and backward",
)  # fmt: skip
def flag_set_between_forward_and_backward(here):
    """`require_backward_grad_sync` is set after forward, too late for the last micro-batch."""
    model, optimizer = prepared(here)
    model.require_backward_grad_sync = False
    for step in range(LONG):
        optimizer.zero_grad()
        for micro in range(2):
            loss = loss_of(model, here.batch(2 * step + micro)) / 2
            model.require_backward_grad_sync = micro == 1
            loss.backward()
            model.require_backward_grad_sync = False
        optimizer.step()
        yield


@mistake(
    f"{GITHUB}/speechbrain/speechbrain/pull/2010", "warn", AVERAGED, NO_SYNC, by=20,
    remedy="enter `no_sync` around forward and backward of all but the last micro-batch",
)  # fmt: skip
def no_sync_around_forward(here):
    """Forward runs under `no_sync`, always; backward outside, as if that were what counts."""
    model, optimizer = prepared(here)
    for step in range(LONG):
        optimizer.zero_grad()
        with model.no_sync():
            loss = loss_of(model, here.batch(step))
        loss.backward()
        optimizer.step()
        yield


@mistake(
    f"{GITHUB}/facebookresearch/ClassyVision/pull/706", "silent",
    remedy="right, but each micro-batch is sent: put forward under `no_sync`, too",
)  # fmt: skip
def no_sync_around_backward(here):
    """Only the backward of early micro-batches is under `no_sync`, so each is averaged."""
    model, optimizer = prepared(here)
    for step in here.steps:
        optimizer.zero_grad()
        loss = loss_of(model, here.batch(2 * step)) / 2
        with model.no_sync():
            loss.backward()
        (loss_of(model, here.batch(2 * step + 1)) / 2).backward()
        optimizer.step()
        yield


@mistake(
    f"{GITHUB}/huggingface/accelerate/pull/1624", "warn", AVERAGED, NO_SYNC, by=5,
    remedy="synchronise at the end of an epoch as well: `or i + 1 == len(loader)`",
)  # fmt: skip
def short_window_at_the_end_of_an_epoch(here):
    """An epoch of 6 batches has windows of 4 and 2; the short one steps under `no_sync`."""
    model, optimizer = prepared(here)
    for epoch in range(len(here.steps) // 2):
        for i in range(6):
            is_last = (i + 1) % 4 == 0
            with contextlib.nullcontext() if is_last else model.no_sync():
                (loss_of(model, here.batch(6 * epoch + i)) / 4).backward()
            if is_last or i == 5:
                optimizer.step()
                optimizer.zero_grad()
                yield


@mistake(
    f"{GITHUB}/Lightning-AI/pytorch-lightning/issues/5243", "already", r"rank [01]", by=11,
    remedy="all ranks skip together: all-reduce whether the loss is finite",
)  # fmt: skip
def a_batch_skipped_on_one_rank(here):
    """Rank 1 leaves out the backward of a bad batch; rank 0 waits for it."""
    model, optimizer = prepared(here)
    for step in here.steps:
        if not (here.rank == 1 and step == 4):
            update(model, optimizer, here.batch(step))
        yield
