"""Three element-wise optimizers, in numpy.

``update(weights, gradient, state, **settings)`` changes ``weights`` and ``state`` in place. Since
elements are independent, it may be called for any part of the weights with the same part of the
gradient, and gives that part of the whole update. So a rank can update 1/N of the weights and keep
1/N of the state (``Zero1`` in across_steps.py). Optimizers that take the norm of a layer (LARS,
LAMB) or use a matrix as a whole (Muon, Adafactor) cannot be divided like this.
"""

from __future__ import annotations

from typing import Any

import numpy as np

State = dict[str, Any]


def sgd(
    weights: np.ndarray, gradient: np.ndarray, state: State,
    lr: float, momentum: float = 0.0, weight_decay: float = 0.0,
) -> None:  # fmt: skip
    """
    >>> weights, state = np.array([1.0, 2.0]), {}
    >>> for _ in range(2):
    ...     sgd(weights, np.array([1.0, 0.0]), state, lr=0.1, momentum=0.5)
    >>> weights
    array([0.75, 2.  ])
    """
    gradient = gradient + weight_decay * weights
    if momentum:
        gradient = momentum * state.get("momentum", 0.0) + gradient
        state["momentum"] = gradient
    weights -= lr * gradient


def adamw(
    weights: np.ndarray, gradient: np.ndarray, state: State,
    lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> None:  # fmt: skip
    step = state["step"] = state.get("step", 0) + 1
    first, second = betas
    state["mean"] = first * state.get("mean", 0.0) + (1 - first) * gradient
    state["square"] = second * state.get("square", 0.0) + (1 - second) * gradient**2
    mean = state["mean"] / (1 - first**step)
    square = state["square"] / (1 - second**step)
    weights *= 1 - lr * weight_decay
    weights -= lr * mean / (np.sqrt(square) + eps)


def rmsprop(
    weights: np.ndarray, gradient: np.ndarray, state: State,
    lr: float, alpha: float = 0.99, eps: float = 1e-8, weight_decay: float = 0.0,
) -> None:  # fmt: skip
    gradient = gradient + weight_decay * weights
    state["square"] = alpha * state.get("square", 0.0) + (1 - alpha) * gradient**2
    weights -= lr * gradient / (np.sqrt(state["square"]) + eps)
