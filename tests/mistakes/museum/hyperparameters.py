"""Optimizers that do different things on different ranks."""

import copy

import torch

from tests.mistakes.here import Net, loss_of, update
from tests.mistakes.museum.exhibit import mistake

GITHUB = "https://github.com"
RANK = r"rank 1"
EACH = "give the optimizer the same settings on all ranks"


def train(here, model, optimizer, after_step=lambda step, loss: None):
    for step in here.steps:
        loss = update(model, optimizer, here.batch(step))
        after_step(step, loss)
        yield


@mistake(
    f"{GITHUB}/horovod/horovod/issues/526", "warn", RANK, r"\blr\b|learning rate", r"0\.1", by=3,
    remedy=EACH,
)  # fmt: skip
def learning_rate_of_one_rank(here):
    """Rank 1 has read another learning rate from its configuration."""
    model = here.wrap(Net())
    yield from train(here, model, here.optimizer(model, lr=0.1 if here.rank == 1 else 0.05))


@mistake(
    f"{GITHUB}/huggingface/accelerate/issues/94", "warn", RANK, r"\blr\b|learning rate", by=6,
    remedy="decay on all ranks, not only on the main process",
)  # fmt: skip
def decay_on_the_main_process(here):
    """`if rank == 0:` around the line that lowers the learning rate."""
    model = here.wrap(Net())
    optimizer = here.optimizer(model)

    def decay(step, _):
        if step == 3 and here.rank == 0:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5

    yield from train(here, model, optimizer, decay)


@mistake(
    f"{GITHUB}/horovod/horovod/issues/526", "warn", RANK, r"weight_decay", by=3,
    remedy=EACH,
)  # fmt: skip
def weight_decay_of_one_rank(here):
    """Weight decay is on on rank 1 only."""
    model = here.wrap(Net())
    decay = 0.1 if here.rank == 1 else 0.0
    yield from train(here, model, here.optimizer(model, torch.optim.AdamW, weight_decay=decay))


@mistake(
    f"{GITHUB}/horovod/horovod/issues/526", "warn", RANK, r"betas", by=3,
    remedy=EACH,
)  # fmt: skip
def betas_of_one_rank(here):
    """Adam has other betas on rank 1."""
    model = here.wrap(Net())
    betas = (0.9, 0.95 if here.rank == 1 else 0.999)
    yield from train(here, model, here.optimizer(model, torch.optim.Adam, lr=0.01, betas=betas))


@mistake(
    f"{GITHUB}/horovod/horovod/issues/526", "warn", r"rank [01]", by=4,
    remedy=EACH,
)  # fmt: skip
def another_optimizer_on_one_rank(here):
    """A default differs between two versions of the script: Adam on rank 1, SGD on rank 0."""
    model = here.wrap(Net())
    kind = torch.optim.Adam if here.rank == 1 else torch.optim.SGD
    yield from train(here, model, here.optimizer(model, kind, lr=0.01))


@mistake(
    f"{GITHUB}/rmchurch/disruptcnn/issues/3", "warn", r"rank [01]", r"\blr\b|learning rate", by=7,
    remedy="all-reduce the loss before `scheduler.step(loss)`",
)  # fmt: skip
def plateau_of_the_local_loss(here):
    """`ReduceLROnPlateau` follows the loss of each rank."""
    model = here.wrap(Net())
    optimizer = here.optimizer(model)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)

    def follow(step, loss):
        scheduler.step(1.0 / (step + 1) if here.rank == 0 else 1.0 + step)

    yield from train(here, model, optimizer, follow)


@mistake(
    f"{GITHUB}/huggingface/accelerate/issues/2926", "warn", r"rank [01]", r"\blr\b|learning rate",
    by=7, remedy="step schedulers equally often on all ranks",
)  # fmt: skip
def scheduler_one_step_ahead(here):
    """Rank 1 steps its scheduler once more, when it writes a checkpoint."""
    model = here.wrap(Net())
    optimizer = here.optimizer(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    def schedule(step, _):
        scheduler.step()
        if step == 4 and here.rank == 1:
            scheduler.step()

    yield from train(here, model, optimizer, schedule)


@mistake(
    f"{GITHUB}/vllm-project/speculators/pull/926", "warn", r"rank [01]", by=8,
    remedy="load the optimizer on all ranks",
)  # fmt: skip
def optimizer_state_loaded_on_one_rank(here):
    """A resumed run loads the state of Adam on rank 0 only."""
    model = here.wrap(Net())
    optimizer = here.optimizer(model, torch.optim.Adam, lr=0.01)
    saved = None
    for step in here.steps:
        update(model, optimizer, here.batch(step))
        if step == 1:
            saved = copy.deepcopy(optimizer.state_dict())
        if step == 3 and here.rank == 0:
            optimizer.load_state_dict(saved)
        yield


@mistake(
    f"{GITHUB}/PaddlePaddle/PaddleNLP/pull/7256", "warn", r"rank [01]", by=8,
    remedy="reset on all ranks, or on none",
)  # fmt: skip
def momentum_reset_on_one_rank(here):
    """After a bad batch rank 1 forgets its momentum."""
    model = here.wrap(Net())
    optimizer = here.optimizer(model, momentum=0.9)

    def forget(step, _):
        if step == 3 and here.rank == 1:
            optimizer.state.clear()

    yield from train(here, model, optimizer, forget)


@mistake(
    f"{GITHUB}/wenet-e2e/wenet/issues/622", "warn", r"rank [01]", r"\blr\b|learning rate", by=3,
    remedy="count the samples of all ranks",
)  # fmt: skip
def warm_up_by_local_samples(here):
    """The learning rate follows the number of samples that this rank has seen."""
    model = here.wrap(Net())
    optimizer = here.optimizer(model)
    seen = 0
    for step in here.steps:
        rows = 4 + 2 * here.rank
        seen += rows
        for group in optimizer.param_groups:
            group["lr"] = min(0.05, 0.001 * seen)
        optimizer.zero_grad()
        loss_of(model, here.batch(step, rows)).backward()
        optimizer.step()
        yield
