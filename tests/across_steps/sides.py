"""What programs run on: ``DataParallel`` with a schedule, and the twin in plain Python."""

import torch
from torch import nn

import dpcore
from dpcore.reference import across_steps, element_wise
from tests.across_steps.models import made
from tests.data_parallel.models import batch, part

CAP_MB = 0.002  # a few buckets, and in each some parameters
SMALL_CAP_MB = CAP_MB / 8  # more than have memory at a time

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, element_wise.sgd, {"lr": 0.1, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, element_wise.adamw, {"lr": 0.01, "weight_decay": 0.1}),
    "rmsprop": (torch.optim.RMSprop, element_wise.rmsprop, {"lr": 0.01, "alpha": 0.9}),
}
OTHER_SETTINGS = {"lr": 0.003, "weight_decay": 0.0}  # of the second group


def is_in_second_group(parameter):
    return parameter.dim() == 1


class Wrapped:
    """One rank. ``model`` and ``optimizer``: what wraps them instead of dpcore's own."""

    def __init__(
        self, comm, case, kind, schedule, *, model=None, optimizer=None, dtype=torch.float64
    ):
        torch.set_num_threads(1)  # else a thread's first backward may be cut differently
        self.comm, self.dtype = comm, dtype
        make_model = model or dpcore.DataParallel
        self.model = make_model(
            made(case.model).to(dtype), comm=comm, schedule=schedule,
            bucket_cap_mb=SMALL_CAP_MB if schedule == "zero2" else CAP_MB, deterministic=True,
            find_unused_parameters=case.find_unused,
        )  # fmt: skip
        self.optimizer = plain_optimizer(self.model, kind, case.groups)
        self.is_late = schedule != "bucketed"
        if self.is_late:
            self.optimizer = (optimizer or dpcore.DistributedOptimizer)(self.optimizer, self.model)
        self.factor, self.set_to_none = 1.0, True
        self.zeroes_after_forward = False
        self.rates = torch.optim.lr_scheduler.MultiplicativeLR(
            self.optimizer, lambda _: self.factor
        )

    def loss(self, number):
        x, y = (part(tensor, self.comm).to(self.dtype) for tensor in batch(number))
        return nn.functional.mse_loss(self.model(x), y)

    def backward(self, *numbers):
        loss = sum(self.loss(number) for number in numbers)
        if self.zeroes_after_forward:
            self.zero_gradients()
        loss.backward()
        return loss.item()

    def accumulate(self, number):
        with self.model.no_sync():
            self.loss(number).backward()

    def clip(self, norm, kind):
        if self.is_late:
            return self.optimizer.clip_grad_norm_(norm, kind).item()
        return nn.utils.clip_grad_norm_(self.model.parameters(), norm, kind).item()

    def step(self):
        self.optimizer.step()
        if not self.zeroes_after_forward:
            self.zero_gradients()

    def zero_gradients(self):
        if self.set_to_none is not None:
            self.optimizer.zero_grad(set_to_none=self.set_to_none)

    def largest_gradient(self):
        return max(p.grad.abs().max().item() for p in self.model.parameters())

    def scale_rates(self, factor):
        self.factor = factor
        self.rates.step()

    def evaluate(self, number):
        self.model.eval()
        with torch.no_grad():
            loss = self.loss(number).item()
        self.model.train()
        return loss

    def weights(self):
        """What a program saves, right after the last step."""
        return {name: value.clone() for name, value in self.model.module.state_dict().items()}

    def state(self):
        """In torch's format, of all ranks together."""
        return self.optimizer.full_state_dict() if self.is_late else self.optimizer.state_dict()


def plain_optimizer(model, kind, groups):
    cls, _, settings = OPTIMIZERS[kind]
    if not groups:
        return cls(model.parameters(), **settings)
    second = [p for p in model.parameters() if is_in_second_group(p)]
    first = [p for p in model.parameters() if not is_in_second_group(p)]
    return cls([{"params": first}, {"params": second} | OTHER_SETTINGS], **settings)


class Twin:
    """All ranks. A layer is a parameter."""

    def __init__(self, world, case, kind, schedule):
        self.world = world
        self.module = made(case.model)
        parameters = list(self.module.parameters())
        _, update, settings = OPTIMIZERS[kind]
        self.settings = [
            settings | (OTHER_SETTINGS if case.groups and is_in_second_group(p) else {})
            for p in parameters
        ]
        self.training = across_steps.SCHEDULES[schedule](
            [p.detach().numpy() for p in parameters], self.gradient, update, world, self.settings
        )

    def gradient(self, weights, x_and_y):
        self.take(weights)
        self.module.zero_grad()
        self.loss(x_and_y).backward()
        return [None if p.grad is None else p.grad.numpy() for p in self.module.parameters()]

    def take(self, weights):
        with torch.no_grad():
            for parameter, layer in zip(self.module.parameters(), weights, strict=True):
                parameter.copy_(torch.from_numpy(layer))

    def loss(self, x_and_y):
        x, y = x_and_y
        return nn.functional.mse_loss(self.module(x), y)

    def batches(self, number):
        return list(zip(*(tensor.chunk(self.world) for tensor in batch(number)), strict=True))

    def backward(self, number):
        self.training.backward(self.batches(number))

    def accumulate(self, number):
        self.training.accumulate(self.batches(number))

    def clip(self, norm, kind):
        assert kind == 2.0
        self.training.clip(norm)

    def step(self):
        self.training.step()

    def scale_rates(self, factor):
        for settings in self.settings:
            settings["lr"] *= factor

    def evaluate(self, number):
        """Rank 0 does."""
        self.take(self.training.result())
        with torch.no_grad():
            return self.loss(self.batches(number)[0]).item()

    def weights(self):
        self.take(self.training.result())
        return {name: value.clone() for name, value in self.module.state_dict().items()}
