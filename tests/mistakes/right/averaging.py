"""Parameters that a program averages itself, hooks, sharded optimizers, moving averages."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

import dpcore
from tests.mistakes.here import Net, loss_of, update
from tests.mistakes.right.known import right


def prepared(here, kind=torch.optim.SGD, **settings):
    model = here.wrap(Net())
    return model, here.optimizer(model, kind, **settings)


def local_sgd(here, every, average):
    model, optimizer = prepared(here)
    for step in range(3 * every):
        optimizer.zero_grad()
        with model.no_sync():
            loss_of(model, here.batch(step)).backward()
        optimizer.step()
        if (step + 1) % every == 0:
            average(here, model)
        yield


def average_each(here, model):
    for parameter in model.parameters():
        here.all_reduce(parameter.data).div_(here.world)


def average_flattened(here, model):
    flat = nn.utils.parameters_to_vector(model.parameters())
    with torch.no_grad():
        nn.utils.vector_to_parameters(here.all_reduce(flat).div_(here.world), model.parameters())


@right("tcp")
def local_sgd_by_hand_every_4(here):
    """Steps under ``no_sync``; every fourth averages the parameters."""
    yield from local_sgd(here, 4, average_each)


@right("tcp")
def local_sgd_by_hand_every_8(here):
    """The same with eight steps."""
    yield from local_sgd(here, 8, average_each)


@right()
def local_sgd_by_hand_every_16(here):
    """And with sixteen."""
    yield from local_sgd(here, 16, average_each)


@right()
def local_sgd_through_one_flat_vector(here):
    """What is averaged is a copy, which then becomes the parameters."""
    yield from local_sgd(here, 4, average_flattened)


@right()
def local_sgd_after_a_warm_up(here):
    """Four averaged steps, then local ones that are averaged every fourth."""
    model, optimizer = prepared(here)
    for step in range(16):
        if step < 4:
            update(model, optimizer, here.batch(step))
        else:
            update(model.module, optimizer, here.batch(step))
            if (step + 1) % 4 == 0:
                average_each(here, model)
        yield


@right()
def local_sgd_of_dpcore(here):
    """``dpcore.LocalSGD`` trains the bare module of a model that was wrapped before."""
    model, optimizer = prepared(here)
    update(model, optimizer, here.batch(0))
    yield
    with dpcore.LocalSGD(model.module, optimizer, sync_every=4):
        for step in range(1, 9):
            update(model.module, optimizer, here.batch(step))
            yield


@right(in_group=True)
def post_local_sgd(here):
    """torch's hook, which stops averaging gradients, and its averager of parameters."""
    from torch.distributed.optim import PostLocalSGDOptimizer  # takes a second, and warns

    model = here.wrap(Net())
    state = post_localSGD_hook.PostLocalSGDState(
        None, None, start_localSGD_iter=2, post_local_gradient_allreduce=False
    )
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.05), PeriodicModelAverager(4, warmup_steps=2)
    )
    for step in range(14):
        update(model, optimizer, here.batch(step))
        yield


@right(in_group=True)
def averager_of_parameters(here):
    """The averager alone, with steps under ``no_sync``."""
    model, optimizer = prepared(here)
    averager = PeriodicModelAverager(4, warmup_steps=0)
    for step in range(12):
        optimizer.zero_grad()
        with model.no_sync():
            loss_of(model, here.batch(step)).backward()
        optimizer.step()
        averager.average_parameters(model.parameters())
        yield


@right(in_group=True)
def compressed_by_a_hook(here):
    """Gradients travel as halves."""
    model, optimizer = prepared(here)
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    for step in here.steps:
        update(model, optimizer, here.batch(step))
        yield


@right(in_group=True)
def power_sgd(here):
    """Low ranks, with what is left added to the next step on each rank."""
    model, optimizer = prepared(here)
    state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for step in here.steps:
        update(model, optimizer, here.batch(step))
        yield


@right(in_group=True)
def zero_redundancy_optimizer(here):
    """Each rank keeps the state of some parameters, and sends them to the others."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = here.wrap(Net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    for step in here.steps:
        update(model, optimizer, here.batch(step))
        yield


@right()
def sharded_by_hand(here):
    """Rank r updates every other parameter, and broadcasts it."""
    model = here.wrap(Net())
    parameters = list(model.parameters())
    own = torch.optim.Adam(parameters[here.rank :: here.world], lr=0.01)
    for step in here.steps:
        model.zero_grad()
        loss_of(model, here.batch(step)).backward()
        own.step()
        for number, parameter in enumerate(parameters):
            here.broadcast(parameter.data, number % here.world)
        yield


@right(in_group=True)
def gradients_averaged_twice(here):
    """A script that was written before DDP and still averages gradients itself."""
    model, optimizer = prepared(here)
    for step in here.steps:
        optimizer.zero_grad()
        loss_of(model, here.batch(step)).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= here.world
        optimizer.step()
        yield


@right()
def gradients_averaged_by_hand_under_no_sync(here):
    """As CleanRL does: one flat vector of gradients is averaged, and copied back."""
    model, optimizer = prepared(here)
    for step in here.steps:
        optimizer.zero_grad()
        with model.no_sync():
            loss_of(model, here.batch(step)).backward()
        flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        flat = here.all_reduce(flat) / here.world
        at = 0
        for parameter in model.parameters():
            parameter.grad.copy_(flat[at : at + parameter.numel()].view_as(parameter))
            at += parameter.numel()
        optimizer.step()
        yield


@right()
def weights_of_rank_0_broadcast_by_hand(here):
    """Rank 0 loads a checkpoint after wrapping, and sends the weights to the others."""
    model, optimizer = prepared(here)
    for step in here.steps:
        if step == 4:
            if here.rank == 0:
                model.module.load_state_dict(Net(seed=2).state_dict())
            for parameter in model.parameters():
                here.broadcast(parameter.data)
        update(model, optimizer, here.batch(step))
        yield


@right()
def averages_of_weights(here):
    """``AveragedModel`` with its scheduler, and ``update_bn`` at the end, on each rank."""
    model = here.wrap(Net(buffers=True))
    optimizer = here.optimizer(model, momentum=0.9)
    averaged = AveragedModel(model.module)
    rates = SWALR(optimizer, swa_lr=0.01, anneal_epochs=3)
    for step in here.steps:
        update(model, optimizer, here.batch(step))
        averaged.update_parameters(model.module)
        rates.step()
        yield
    update_bn([here.batch(step)[0] for step in range(3)], averaged)


@right()
def averaged_weights_swapped_in_on_rank_0(here):
    """Rank 0 evaluates with the average of weights, and puts its own back."""
    model, optimizer = prepared(here)
    average = copy.deepcopy(model.module)
    for step in here.steps:
        update(model, optimizer, here.batch(step))
        with torch.no_grad():
            for mean, value in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(value, 0.1)
        if step % 3 == 2 and here.rank == 0:
            own = {name: value.clone() for name, value in model.module.state_dict().items()}
            model.module.load_state_dict(average.state_dict())
            with torch.no_grad():
                loss_of(model.module, here.batch(step))
            model.module.load_state_dict(own)
        yield
