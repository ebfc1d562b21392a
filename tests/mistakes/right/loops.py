"""Optimizers, schedulers, checkpoints and evaluation, as careful loops have them."""

import copy
from collections import OrderedDict

import torch
from torch import nn

from tests.mistakes.here import Net, loss_of, update
from tests.mistakes.right.known import right


def prepared(here, *, kind=torch.optim.SGD, net=None, **settings):
    model = here.wrap(Net() if net is None else net)
    return model, here.optimizer(model, kind, **settings)


@right("tcp", "priority", "dear", "zero1", "gloo", "torch")
def plain(here):
    """Nothing but a loop."""
    model, optimizer = prepared(here, momentum=0.9)
    for step in here.steps:
        update(model, optimizer, here.batch(step))
        yield


@right("tcp", "priority", "dear", "zero1")
def a_scheduler_for_each_batch(here):
    """One cycle, which also changes the momentum."""
    model, optimizer = prepared(here, momentum=0.9)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=40)
    for step in here.steps:
        update(model, optimizer, here.batch(step))
        cycle.step()
        yield


@right()
def a_plateau_of_the_averaged_loss(here):
    """All ranks follow one number."""
    model, optimizer = prepared(here)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for step in here.steps:
        loss = update(model, optimizer, here.batch(step))
        scheduler.step(here.all_reduce(torch.tensor(loss)).item() / here.world)
        yield


@right()
def a_rate_that_is_a_tensor(here):
    """As compiled optimizers want it; it changes in place."""
    model, optimizer = prepared(here, kind=torch.optim.Adam, lr=torch.tensor(0.01))
    for step in here.steps:
        update(model, optimizer, here.batch(step))
        optimizer.param_groups[0]["lr"].mul_(0.9)
        yield


@right()
def alternating_optimizers(here):
    """Two optimizers of one model take turns."""
    model = here.wrap(Net())
    of_features = torch.optim.SGD(model.module.features.parameters(), lr=0.05)
    of_head = torch.optim.Adam(model.module.head.parameters(), lr=0.01)
    for step in here.steps:
        model.zero_grad()
        loss_of(model, here.batch(step)).backward()
        (of_features if step % 2 else of_head).step()
        yield


@right()
def two_optimizers_with_groups(here):
    """Both step each time, with learning rates of their own."""
    model = here.wrap(Net())
    head = model.module.head
    optimizers = [
        torch.optim.AdamW(model.module.features.parameters(), lr=0.001, weight_decay=0.1),
        torch.optim.SGD([{"params": [head.weight]}, {"params": [head.bias], "lr": 1.0}], lr=0.05),
    ]
    for step in here.steps:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(model, here.batch(step)).backward()
        for optimizer in optimizers:
            optimizer.step()
        yield


@right("tcp")
def sgd_by_hand(here):
    """No optimizer at all: ``p.data.add_``."""
    model = here.wrap(Net())
    for step in here.steps:
        model.zero_grad()
        loss_of(model, here.batch(step)).backward()
        for parameter in model.parameters():
            parameter.data.add_(parameter.grad, alpha=-0.05)
        yield


class Lion(torch.optim.Optimizer):
    """As people write optimizers of their own, with what they like in the groups."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.99), "of": lambda: lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                parameter.sub_(mean.lerp(parameter.grad, 0.1).sign(), alpha=group["lr"])
                mean.lerp_(parameter.grad, 0.01)


@right()
def an_optimizer_of_ones_own(here):
    """Its groups have a function in them."""
    model, optimizer = prepared(here, kind=Lion, lr=0.001)
    for step in here.steps:
        update(model, optimizer, here.batch(step))
        yield


class NotAnOptimizer:
    """It has no base class, so no hook of torch knows of its steps."""

    def __init__(self, parameters):
        self.parameters = list(parameters)

    def zero_grad(self):
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self):
        for parameter in self.parameters:
            parameter -= 0.05 * parameter.grad


@right()
def an_optimizer_without_a_base_class(here):
    """The program steps, and torch's hooks hear nothing."""
    model = here.wrap(Net())
    optimizer = NotAnOptimizer(model.parameters())
    for step in here.steps:
        update(model, optimizer, here.batch(step))
        yield


@right("tcp")
def lbfgs(here):
    """A closure runs forward and backward several times within a step."""
    model, optimizer = prepared(here, kind=torch.optim.LBFGS, lr=0.5, max_iter=4)
    for step in here.steps:

        def closure(step=step):
            optimizer.zero_grad()
            loss = loss_of(model, here.batch(step))
            loss.backward()
            return here.all_reduce(loss.detach().clone()) / here.world

        optimizer.step(closure)
        yield


@right()
def a_closure_as_lightning_gives_it(here):
    """Every step runs forward and backward within ``optimizer.step(closure)``."""
    model, optimizer = prepared(here, kind=torch.optim.Adam, lr=0.01)
    for step in here.steps:

        def closure(step=step):
            loss = loss_of(model, here.batch(step))
            optimizer.zero_grad()
            loss.backward()
            return loss

        optimizer.step(closure)
        yield


@right()
def own_dropout_on_each_rank(here):
    """Seeds differ on ranks after the model is made."""
    model, optimizer = prepared(here, net=Net(dropout=0.5))
    torch.manual_seed(here.rank)
    for step in here.steps:
        update(model, optimizer, here.batch(step))
        yield


@right("tcp")
def evaluation_on_rank_0(here):
    """``model.eval()`` and ``model.module(x)`` on rank 0 alone, then ``model.train()``."""
    model, optimizer = prepared(here, net=Net(buffers=True, dropout=0.3))
    for step in here.steps:
        update(model, optimizer, here.batch(step))
        if step % 3 == 2 and here.rank == 0:
            model.eval()
            with torch.no_grad():
                loss_of(model.module, here.batch(step))
            model.train()
        yield


@right()
def evaluation_on_all_ranks(here):
    """Through the wrapper, with different numbers of batches; the metric is a sum."""
    model, optimizer = prepared(here)
    for step in here.steps:
        update(model, optimizer, here.batch(step))
        if step % 3 == 2:
            model.eval()
            with torch.no_grad():
                losses = [loss_of(model, here.batch(n)) for n in range(2 + here.rank)]
            here.all_reduce(torch.stack([sum(losses), torch.tensor(float(len(losses)))]))
            model.train()
        yield


@right("tcp")
def resumed_on_all_ranks(here):
    """Weights and optimizer are loaded on all ranks, after wrapping."""
    model, optimizer = prepared(here, kind=torch.optim.AdamW, lr=0.01)
    saved = None
    for step in here.steps:
        update(model, optimizer, here.batch(step))
        if step == 2:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        if step == 5:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        yield


@right()
def a_search_for_the_rate(here):
    """Steps with growing rates, after which all ranks put everything back."""
    model, optimizer = prepared(here)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for step in range(4):
        optimizer.param_groups[0]["lr"] = 1e-4 * 10**step
        update(model, optimizer, here.batch(step))
        yield
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    for step in here.steps:
        update(model, optimizer, here.batch(step))
        yield


@right()
def an_early_stop_together(here):
    """All ranks leave in the same step, since they have agreed."""
    model, optimizer = prepared(here)
    for step in here.steps:
        loss = update(model, optimizer, here.batch(step))
        if here.all_reduce(torch.tensor(float(loss < 1e9 and step == 6))) > 0:
            return
        yield


@right()
def noise_with_one_seed(here):
    """All ranks add the same noise to the weights and to the gradients."""
    model, optimizer = prepared(here)
    randomness = torch.Generator().manual_seed(3)
    for step in here.steps:
        optimizer.zero_grad()
        loss_of(model, here.batch(step)).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=randomness)
                parameter.grad.add_(noise, alpha=0.01)
                parameter.mul_(1 + 0.001 * noise)
        optimizer.step()
        yield


@right()
def lookahead(here):
    """Every third step goes back half of the way, on all ranks."""
    model, optimizer = prepared(here)
    slow = [parameter.detach().clone() for parameter in model.parameters()]
    for step in here.steps:
        update(model, optimizer, here.batch(step))
        if step % 3 == 2:
            with torch.no_grad():
                for value, parameter in zip(slow, model.parameters(), strict=True):
                    value.lerp_(parameter, 0.5)
                    parameter.copy_(value)
        yield


@right()
def weights_that_differ_in_training_and_evaluation(here):
    """As schedule-free optimizers do: all ranks swap weights before and after an evaluation."""
    model, optimizer = prepared(here)
    average = [parameter.detach().clone() for parameter in model.parameters()]
    for step in here.steps:
        update(model, optimizer, here.batch(step))
        with torch.no_grad():
            for mean, parameter in zip(average, model.parameters(), strict=True):
                mean.lerp_(parameter, 0.2)
            if step % 3 == 2:
                for mean, parameter in zip(average, model.parameters(), strict=True):
                    parameter.lerp_(mean, 0.9)
                loss_of(model.module, here.batch(step))
                for mean, parameter in zip(average, model.parameters(), strict=True):
                    parameter.lerp_(mean, 1 - 1 / (1 - 0.9))
        yield


@right()
def wrapped_again_for_another_fold(here):
    """Cross-validation: a new wrapper, with an optimizer of its own, around a module of before."""
    module = Net()
    for fold in range(3):
        model, optimizer = prepared(here, net=module)
        for step in range(3):
            update(model, optimizer, here.batch(10 * fold + step))
            yield
        model.module.load_state_dict(Net(seed=fold).state_dict())


@right()
def a_probe_on_rank_0(here):
    """Rank 0 trains an unwrapped layer on what the model computes."""
    model, optimizer = prepared(here)
    probe = nn.Linear(1, 1)
    of_probe = torch.optim.SGD(probe.parameters(), lr=0.1)
    for step in here.steps:
        update(model, optimizer, here.batch(step))
        if here.rank == 0:
            x, y = here.batch(step)
            with torch.no_grad():
                seen = model.module(x)
            update(probe, of_probe, (seen, y))
        yield


@right()
def gradients_read_and_thrown_away(here):
    """A gradient penalty is logged by ``autograd.grad``; a local backward is zeroed before use."""
    model, optimizer = prepared(here)
    for step in here.steps:
        optimizer.zero_grad()
        loss_of(model.module, here.batch(step + 50)).backward()
        norm = sum(parameter.grad.norm() for parameter in model.parameters())
        optimizer.zero_grad()
        (loss_of(model, here.batch(step)) * (1 + 0 * norm)).backward()
        optimizer.step()
        yield


class Lookahead(torch.optim.Optimizer):
    """As timm's: it steps another optimizer, and does without the constructor of torch's class."""

    def __init__(self, base):
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self.base, self.defaults = base, base.defaults
        self.param_groups, self.state = base.param_groups, base.state
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        self.steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        loss = self.base.step(closure)
        self.steps += 1
        if self.steps % 3 == 0:
            fast = [p for group in self.param_groups for p in group["params"]]
            for mine, slow in zip(fast, self.slow, strict=True):
                slow.lerp_(mine, 0.5)
                mine.copy_(slow)
        return loss


@right()
def an_optimizer_around_another(here):
    """Lookahead, which defines only the hooks that it needs."""
    model = here.wrap(Net())
    optimizer = Lookahead(torch.optim.SGD(model.parameters(), lr=0.05))
    for step in here.steps:
        update(model, optimizer, here.batch(step))
        yield
