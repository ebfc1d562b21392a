"""LARS, LAMB and NovoGrad: optimizers that scale the step of each layer by its weights or gradient.

With a large batch, one learning rate is too large for some layers and too small for others: what a
layer bears depends on how long its weights are beside its update. These divide a layer's step by
the length of its gradient (LARS, NovoGrad) or of its update (LAMB).

    optimizer = Lamb(model.parameters(), lr=0.01)

A layer is one parameter with two dimensions or more. Biases and the scales of norms are stepped
without a factor by LARS and LAMB, as in the code of their authors. The layers of a group go
together, by torch's _foreach functions: a dozen calls, however many they are.

Under dpcore.DistributedOptimizer they run with "priority" and "dear", which step whole parameters.
"zero1" cuts parameters between ranks, so each would see the length of a part: it refuses them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer


class Layerwise(Optimizer):
    """What the three share: state, step counts, and which parameters have a gradient."""

    per_parameter = True  # for dpcore.DistributedOptimizer: a parameter needs itself alone
    like_weights: tuple[str, ...] = ()  # names of the state that has the parameter's shape
    usual: ClassVar[dict[str, Any]] = {}  # what may be given beside lr

    def __init__(self, parameters: Iterable[Any], lr: float = 0.01, **given: Any) -> None:
        name, unknown = type(self).__name__, sorted(set(given) - set(self.usual))
        if unknown:
            raise TypeError(f"{name} knows no {unknown[0]}; it knows lr, {', '.join(self.usual)}")
        if not lr >= 0:
            raise ValueError(f"{name}: lr={lr!r} must be 0 or more")
        super().__init__(parameters, {**self.usual, **given, "lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            weights = [p for p in group["params"] if p.grad is not None]
            for weight in weights:
                state = self.state[weight]
                if not state:
                    state.update({name: torch.zeros_like(weight) for name in self.like_weights})
                    state["step"] = 0
                state["step"] += 1
            if weights:
                self.update(group, weights, [weight.grad for weight in weights])
        return loss

    def update(self, group: Any, weights: list[Tensor], gradients: list[Tensor]) -> None:
        raise NotImplementedError

    def states(self, name: str, weights: Sequence[Tensor]) -> list[Any]:
        return [self.state[weight][name] for weight in weights]


def factor(weight: Tensor, above: Tensor, below: Tensor) -> Tensor:
    """above / below for a layer; 1 where one of both is zero, and for biases and norms."""
    is_scaled = (above > 0) & (below > 0) & (weight.dim() > 1)
    return torch.where(is_scaled, above / below, 1.0)


class Lars(Layerwise):
    """You, Gitman, Ginsburg: Large Batch Training of Convolutional Networks, 2017, algorithm 1.

    v = momentum v + lr eta |w| / (|g| + decay |w|) (g + decay w);  w = w - v
    """

    like_weights = ("velocity",)
    usual: ClassVar = {"momentum": 0.9, "weight_decay": 0.0, "eta": 0.001}

    def update(self, group: Any, weights: list[Tensor], gradients: list[Tensor]) -> None:
        eta, decay = group["eta"], group["weight_decay"]
        velocities = self.states("velocity", weights)
        lengths = zip(weights, *map(torch._foreach_norm, (weights, gradients)), strict=True)
        rates = [group["lr"] * factor(layer, eta * w, g + decay * w) for layer, w, g in lengths]
        updates = torch._foreach_add(gradients, weights, alpha=decay)
        torch._foreach_mul_(updates, rates)
        torch._foreach_mul_(velocities, group["momentum"])
        torch._foreach_add_(velocities, updates)
        torch._foreach_sub_(weights, velocities)


class Lamb(Layerwise):
    """You et al.: Large Batch Optimization for Deep Learning, 2020, algorithm 2.

    u = Adam's update + decay w;  w = w - lr |w| / |u| u
    """

    like_weights = ("mean", "square")
    usual: ClassVar = {"betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.0}

    def update(self, group: Any, weights: list[Tensor], gradients: list[Tensor]) -> None:
        (beta1, beta2), steps = group["betas"], self.states("step", weights)
        means, squares = self.states("mean", weights), self.states("square", weights)
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        scales = torch._foreach_div(squares, [1 - beta2**step for step in steps])
        torch._foreach_sqrt_(scales)
        torch._foreach_add_(scales, group["eps"])
        updates = torch._foreach_div(means, [1 - beta1**step for step in steps])
        torch._foreach_div_(updates, scales)
        torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
        lengths = zip(weights, *map(torch._foreach_norm, (weights, updates)), strict=True)
        torch._foreach_mul_(updates, [group["lr"] * factor(*three) for three in lengths])
        torch._foreach_sub_(weights, updates)


class NovoGrad(Layerwise):
    """Ginsburg et al.: Stochastic Gradient Methods with Layer-wise Adaptive Moments, 2019,
    algorithm 1. The second moment is one number per layer, and begins with the first gradient's.

    v = beta2 v + (1 - beta2) |g|^2;  m = beta1 m + g / sqrt(v) + decay w;  w = w - lr m
    """

    like_weights = ("mean",)
    usual: ClassVar = {"betas": (0.95, 0.98), "eps": 1e-8, "weight_decay": 0.0}

    def update(self, group: Any, weights: list[Tensor], gradients: list[Tensor]) -> None:
        beta1, beta2 = group["betas"]
        for weight, length in zip(weights, torch._foreach_norm(gradients), strict=True):
            before = self.state[weight].get("square", length**2)
            self.state[weight]["square"] = torch.lerp(before, length**2, 1 - beta2)
        means, squares = self.states("mean", weights), self.states("square", weights)
        updates = torch._foreach_div(gradients, [v.sqrt() + group["eps"] for v in squares])
        torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
        torch._foreach_mul_(means, beta1)
        torch._foreach_add_(means, updates)
        torch._foreach_sub_(weights, torch._foreach_mul(means, group["lr"]))
