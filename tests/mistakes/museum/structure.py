"""Parameters that optimizers or ranks do not share, models in another order, evaluation."""

import torch
from torch import nn

from tests.mistakes.here import Net, loss_of, update
from tests.mistakes.museum.exhibit import mistake

GITHUB = "https://github.com"
NO_OPTIMIZER = r"(?i)optimizer"
HEAD = r"head\.weight"
MAKE_IT_LATER = "make the optimizer after the model is complete"


def train(here, model, optimizer, before_step=lambda step: None):
    for step in here.steps:
        before_step(step)
        update(model, optimizer, here.batch(step))
        yield


@mistake(
    f"{GITHUB}/huggingface/transformers/pull/3532", "warn", HEAD, NO_OPTIMIZER, by=6,
    remedy=MAKE_IT_LATER,
)  # fmt: skip
def optimizer_made_before_a_new_head(here):
    """The head is replaced after the optimizer was made, and is never trained."""
    module = Net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    module.head = nn.Linear(8, 1)
    model = here.wrap(module)
    yield from train(here, model, here.trained(optimizer, model))


@mistake(
    f"{GITHUB}/pytorch/pytorch/pull/102212", "warn", r"assign=True", NO_OPTIMIZER, by=6,
    remedy=MAKE_IT_LATER,
)  # fmt: skip
def optimizer_made_before_assign(here):
    """`load_state_dict(assign=True)` puts other parameters in the place of the optimizer's."""
    module = Net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    module.load_state_dict(Net(seed=2).state_dict(), assign=True)
    model = here.wrap(module)
    yield from train(here, model, here.trained(optimizer, model))


@mistake(
    f"{GITHUB}/PaddlePaddle/PaddleNLP/pull/5623", "note", HEAD, NO_OPTIMIZER, by=10,
    remedy="tie weights before the optimizer is made",
)  # fmt: skip
def optimizer_made_before_weights_are_tied(here):
    """The head takes another parameter after the optimizer was made."""
    module = Net()
    module.other = nn.Linear(8, 1)
    module.other.bias.requires_grad_(False)
    optimizer = torch.optim.SGD([*module.features.parameters(), module.head.bias], lr=0.05)
    module.head.weight = module.other.weight
    model = here.wrap(module)
    yield from train(here, model, here.trained(optimizer, model))


@mistake(
    f"{GITHUB}/zjunlp/HVPNeT/issues/5", "note", r"head\.", NO_OPTIMIZER, by=10,
    remedy="add its parameters to the optimizer",
)  # fmt: skip
def a_layer_without_an_optimizer(here):
    """The list of parameters for the optimizer leaves out the head."""
    model = here.wrap(Net())
    optimizer = torch.optim.SGD(model.module.features.parameters(), lr=0.05)
    yield from train(here, model, here.trained(optimizer, model))


@mistake(
    f"{GITHUB}/pytorch/pytorch/issues/12603", "already", r"head\.weight", r"refresh", by=2,
    remedy="change the model before wrapping, or `model.refresh()`",
)  # fmt: skip
def a_parameter_replaced_after_wrapping(here):
    """The program assigns a new parameter to a wrapped model."""
    model = here.wrap(Net())
    optimizer = here.optimizer(model)
    model.module.head.weight = nn.Parameter(torch.ones(1, 8))
    yield from train(here, model, optimizer)


@mistake(
    f"{GITHUB}/JDAI-CV/fast-reid/issues/178", "already", r"features\.weight", r"refresh", by=5,
    remedy="`model.refresh()` on all ranks after thawing",
)  # fmt: skip
def a_layer_thawed_after_wrapping(here):
    """A layer that was frozen when the model was wrapped is thawed after some steps."""
    module = Net()
    module.features.requires_grad_(False)
    model = here.wrap(module)
    optimizer = here.optimizer(model)

    def thaw(step):
        if step == 4:
            module.features.requires_grad_(True)

    yield from train(here, model, optimizer, thaw)


@mistake(
    f"{GITHUB}/NVIDIA/apex/issues/149", "already", r"rank [01]", by=8,
    remedy="freeze on all ranks, then `model.refresh()`",
)  # fmt: skip
def a_layer_frozen_on_one_rank(here):
    """Rank 1 freezes a layer in the middle of training."""
    model = here.wrap(Net())

    def freeze(step):
        if step == 4 and here.rank == 1:
            model.module.features.requires_grad_(False)

    yield from train(here, model, here.optimizer(model), freeze)


@mistake(
    f"{GITHUB}/yifan123/flow_grpo/issues/245", "already", r"rank [01]", r"features\.weight", by=1,
    remedy="freeze the same layers on all ranks",
)  # fmt: skip
def a_layer_frozen_on_one_rank_from_the_start(here):
    """Ranks freeze different layers before they wrap the model."""
    module = Net()
    (module.features if here.rank == 1 else module.head).requires_grad_(False)
    model = here.wrap(module)
    yield from train(here, model, here.optimizer(model))


@mistake(
    f"{GITHUB}/pytorch/pytorch/issues/104336", "already", r"(?i)converted", r"refresh", by=5,
    remedy="`model.refresh()` on all ranks",
)  # fmt: skip
def moved_away_and_back(here):
    """The model goes to another type (or device) for a while, and autograd has new nodes for it."""
    model = here.wrap(Net())
    optimizer = here.optimizer(model)

    def move(step):
        if step == 4:
            model.double()
            with torch.no_grad():
                model.module(torch.ones(1, 4, dtype=torch.float64))
            model.float()

    yield from train(here, model, optimizer, move)


class TwoHeads(Net):
    def __init__(self):
        super().__init__()
        self.second = nn.Linear(8, 1)


@mistake(
    f"{GITHUB}/pytorch/pytorch/issues/112152", "already", r"second\.weight",
    r"find_unused_parameters", by=1, remedy="`find_unused_parameters=True`, or drop the layer",
)  # fmt: skip
def a_layer_that_forward_leaves_out(here):
    """A declared layer takes no part in the loss; torch steps once before it says so."""
    model = here.wrap(TwoHeads())
    yield from train(here, model, here.optimizer(model))


@mistake(
    f"{GITHUB}/NVIDIA/apex/issues/19", "already", r"rank [01]", by=6,
    remedy="call models in the same order on all ranks",
)  # fmt: skip
def two_models_in_another_order(here):
    """Rank 1 runs two wrapped models in the other order."""
    models = [here.wrap(Net(seed=seed)) for seed in range(2)]
    optimizers = [here.optimizer(model) for model in models]
    for step in here.steps:
        order = (1, 0) if step == 4 and here.rank == 1 else (0, 1)
        for number in order:
            update(models[number], optimizers[number], here.batch(step))
        yield


@mistake(
    f"{GITHUB}/pytorch/pytorch/issues/54059", "already", r"rank [01]", by=6,
    remedy="`model.module(x)` for evaluation on one rank",
)  # fmt: skip
def evaluation_under_the_wrapper_on_one_rank(here):
    """Rank 0 evaluates with `model(x)`, which sends its buffers to a rank that trains."""
    model = here.wrap(Net(buffers=True))

    def evaluate(step):
        if step == 4 and here.rank == 0:
            loss_of(model, here.batch(step)).item()
            loss_of(model, here.batch(step)).item()

    yield from train(here, model, here.optimizer(model), evaluate)


@mistake(
    f"{GITHUB}/pytorch/pytorch/issues/43658", "silent",
    remedy="nothing to do: it is averaged as any other module",
)  # fmt: skip
def a_scripted_submodule(here):
    """A part of the model is TorchScript."""
    module = Net(buffers=True)
    module.features = torch.jit.script(module.features)
    model = here.wrap(module)
    yield from train(here, model, here.optimizer(model))


@mistake(
    f"{GITHUB}/facebookresearch/optimizers/pull/149", "warn", r"rank [01]", by=7,
    remedy="the same number of backwards on all ranks",
)  # fmt: skip
def a_backward_more_on_one_rank(here):
    """Rank 1 computes a second loss, so its third backward meets the second of rank 0."""
    model = here.wrap(Net())
    optimizer = here.optimizer(model)
    for step in here.steps:
        optimizer.zero_grad()
        loss_of(model, here.batch(step)).backward()
        if step == 4 and here.rank == 1:
            loss_of(model, here.batch(step)).backward()
        optimizer.step()
        yield
