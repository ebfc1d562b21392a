"""Several models with the same parameters over one communicator: none takes part in what another
one communicates."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import dpcore


class Critic(nn.Module):
    def __init__(self, layer=None):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = layer or nn.Identity()
        self.last = nn.Linear(4, 1)

    def forward(self, x):
        return self.last(self.norm(self.first(x))).sum()


def twins(comm, layer=lambda: None, **options):
    """Two of them, in the order in which this rank uses them."""
    pair = [dpcore.DataParallel(Critic(layer()), comm=comm, **options) for _ in range(2)]
    return pair if comm.rank == 0 else pair[::-1]


def by_number(pair):
    return sorted(pair, key=lambda model: model._model_group.number)


def backwards(comm):
    losses = {}
    pair = twins(comm)
    for model in by_number(pair):
        losses[model] = model(torch.ones(2, 4))
    for model in pair:
        losses[model].backward()


def hooks(comm):
    pair = twins(comm)
    for model in pair:
        model.register_comm_hook(None, allreduce_hook)
    for model in pair:
        model(torch.ones(2, 4)).backward()


def stays_at_home(state, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def map_of_unused_parameters(comm):
    pair = twins(comm, find_unused_parameters=True)
    for model in pair:
        model.register_comm_hook(None, stays_at_home)
    for model in pair:
        model(torch.ones(2, 4)).backward()


def buffers(comm):
    pair = twins(comm, layer=lambda: nn.BatchNorm1d(4))
    for model in by_number(pair) * 2 + pair:
        model(torch.ones(2, 4))
    comm.barrier()  # the root of a small broadcast compares later


def normalisation_over_ranks(comm):
    pair = twins(comm, layer=lambda: nn.SyncBatchNorm(4), forward_sync_buffers=False)
    with torch.no_grad():
        for model in pair:
            model(torch.ones(2, 4))


def order_of_buckets(comm):
    pair = twins(comm)
    for model in by_number(pair):
        model(torch.ones(2, 4)).backward()
    for model in pair:
        model(torch.ones(2, 4))
    comm.barrier()


SWAPS = {
    backwards: r"bucket 0 .* of model [12] \(Critic\), step 1",
    hooks: r"model [12] \(Critic\)",
    map_of_unused_parameters: r"map of used parameters of model [12] \(Critic\), step 1",
    buffers: r"disagree.*broadcast",
    normalisation_over_ranks: r"model [12] \(Critic\).*all_gather",
    order_of_buckets: r"disagree.*broadcast",
}


@pytest.mark.parametrize("swap", SWAPS, ids=lambda swap: swap.__name__)
def test_twins_in_another_order_are_a_mismatch_on_every_rank(swap):
    """torch: each rank gets the average of two models' gradients."""

    def body(comm):
        with pytest.raises(dpcore.Mismatch, match=SWAPS[swap]) as problem:
            swap(comm)
        return str(problem.value)

    texts = dpcore.spawn(body, 2, mode="threads", timeout=20)
    assert any("forwards and backwards of its wrapped models in the same order" in t for t in texts)


def test_no_gradient_of_a_twin_arrives():
    def body(comm):
        first, second = pair = twins(comm)
        with pytest.raises(dpcore.Mismatch):
            for model in pair:
                (model(torch.ones(2, 4)) * (1 + comm.rank)).backward()
        own = first.module.last.bias.grad
        assert own is None or own.item() == 2 * (1 + comm.rank)
        assert second.module.last.bias.grad is None

    dpcore.spawn(body, 2, mode="threads", timeout=20)


def gradients_of(comm, *models):
    """What each gets in two steps, where rank 0 has a loss of 1 and rank 1 of 3, and so on."""
    found = []
    for _ in range(2):
        for scale, model in enumerate(models, start=1):
            model.zero_grad()
            loss = model(torch.ones(1, 4)) * scale * (1 + 2 * comm.rank)
            loss.backward()
            found.append(model.module.last.bias.grad.item() / scale)
    return found


def in_the_same_order(comm):
    return gradients_of(comm, *(dpcore.DataParallel(Critic()) for _ in range(3)))


def copies(comm):
    model = dpcore.DataParallel(Critic())
    model(torch.ones(1, 4)).backward()
    return gradients_of(comm, model, copy.deepcopy(model), copy.deepcopy(model))


def a_copy_on_one_rank_only(comm):
    model = dpcore.DataParallel(Critic())
    if comm.rank == 0:
        copy.deepcopy(model)
    return gradients_of(comm, model, dpcore.DataParallel(Critic(), init_sync=False))


def one_wrapped_on_one_rank_only(comm):
    if comm.rank == 0:
        dpcore.DataParallel(Critic(), init_sync=False)
    return gradients_of(comm, *(dpcore.DataParallel(Critic()) for _ in range(2)))


def wrapped_again(comm):
    module = Critic()
    found = gradients_of(comm, dpcore.DataParallel(module))
    return found + gradients_of(comm, dpcore.DataParallel(module), dpcore.DataParallel(Critic()))


def refreshed(comm):
    models = [dpcore.DataParallel(Critic()) for _ in range(2)]
    models[0].module.last = nn.Linear(4, 1)
    models[0].refresh()
    return gradients_of(comm, *models)


USES = (
    in_the_same_order,
    copies,
    a_copy_on_one_rank_only,
    one_wrapped_on_one_rank_only,
    wrapped_again,
    refreshed,
)


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_models_that_look_alike_train_beside_each_other(use):
    def body(comm):
        assert set(use(comm)) == {2.0}

    dpcore.spawn(body, 2, mode="threads", timeout=20)
