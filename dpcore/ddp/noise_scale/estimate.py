"""The noise scale from squared norms of gradients over fewer and over more samples.

The simple noise scale of McCandlish et al. (An Empirical Model of Large-Batch Training, 2018,
appendix A.1) is B = tr(S) / |G|^2: the variance of one sample's gradient, over the square of the
true gradient. A gradient over b samples has the expected square |G|^2 + tr(S) / b, so two batch
sizes determine both. Data parallel training has two: a rank's own gradient, and the mean over
ranks. With one rank, the first accumulated batch is the smaller one.

Both numbers are noisy in one step, and the mean of their ratios would be biased, so they are summed
over steps and divided once.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from dpcore.base.confidence import ratio_interval
from dpcore.ddp.wrapper.outputs import tensors_in
from dpcore.errors import Error

BATCH_UNKNOWN = (
    "the model's inputs hold no tensor whose first dimension is the batch; say how many samples a "
    "forward takes on a rank, batch_size=32"
)
OLD_GRADIENTS = (
    "the gradients of the last step are still there, and those of this step would be added to "
    "them; call optimizer.zero_grad() in each step, and accumulate with model.no_sync()"
)


class Square(NamedTuple):
    """A gradient's squared norm, and its variance in units of that of one sample's gradient (1 / 32
    for the mean over 32 samples)."""

    norm: float
    variance: float


def estimates(small: Square, large: Square) -> tuple[float, float]:
    """Unbiased tr(S) and |G|^2, from the squared norms of gradients over fewer and more samples.

    >>> estimates(Square(9.0, 1 / 2), Square(5.0, 1 / 4))  # |G|^2 = 1, tr(S) = 16
    (16.0, 1.0)
    """
    noise = (small.norm - large.norm) / (small.variance - large.variance)
    return noise, large.norm - noise * large.variance


class Exchange(NamedTuple):
    """What ranks tell each other of a step, for models whose reducer does not."""

    work: Any
    own_and_variance: torch.Tensor  # the mean over ranks, once ``work`` is over
    mean: float  # the squared norm of the mean

    def squares(self, world: int) -> tuple[Square, Square]:
        """Waits for the other ranks."""
        self.work.wait()
        own, variance = self.own_and_variance.tolist()
        return Square(own, variance), Square(self.mean, variance / world)


class GradientNoiseScale:
    """The result of ``gradient_noise_scale``. Its numbers cover the measured steps since the block
    began, or the last ``window`` of them. A rank may read them alone, in the block or after it."""

    def __init__(self, model: Any, window: int | None, every: int, batch_size: int | None) -> None:
        self._model, self._every, self._batch_size = model, every, batch_size
        self._steps: deque[tuple[float, float]] = deque(maxlen=window)
        self._dropped = 0
        self._hook: Any = None
        self._why_not = ""  # nothing more is measured, where it says why

    # ---- what can be read --------------------------------------------------------------------

    @property
    def value(self) -> float:
        """``tr(S) / |G|^2``, in samples. ``inf`` if the noise hides the gradient, ``nan`` if this
        model cannot be measured."""
        self._take()
        if self._why_not and not self._steps:
            return math.nan
        noise, gradient = (math.fsum(values) for values in zip(*self._steps, strict=True))
        return max(0.0, noise / gradient) if gradient > 0 else math.inf

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% confidence interval of the value."""
        self._take()
        if self._why_not and not self._steps:
            return math.nan, math.nan
        noise, gradient = zip(*self._steps, strict=True)
        return ratio_interval(noise, gradient)

    @property
    def steps(self) -> int:
        """The number of measured steps in the value."""
        self._take(needs_one=False)
        return len(self._steps)

    @property
    def dropped(self) -> int:
        """Steps left out because a norm was not finite, as happens with a loss scaler."""
        self._take(needs_one=False)
        return self._dropped

    def __repr__(self) -> str:
        if self.steps == 0:
            why = self._why_not or "no step was measured yet"
            return f"gradient noise scale: {why}"
        low, high = self.interval
        dropped = f", {self._dropped} dropped" if self._dropped else ""
        value = self.value
        hidden = ", whose noise hides the gradient" if value == math.inf else ""
        stopped = f"; it ended there: {self._why_not}" if self._why_not else ""
        return (
            f"gradient noise scale {value:.4g} samples (95%: {low:.4g} to {high:.4g}), "
            f"{self.steps} steps{dropped}{hidden}{stopped}"
        )

    # ---- what measures -----------------------------------------------------------------------

    def _refused(self) -> str:
        """Why this model cannot be measured; "" if it can."""
        raise NotImplementedError

    def _begin(self) -> Any:
        """Hooks into the model; what removes the hook has ``remove()``."""
        raise NotImplementedError

    def _new(self) -> Iterable[tuple[Square, Square]]:
        """The squares of steps that were measured since the last call."""
        raise NotImplementedError

    def __enter__(self) -> GradientNoiseScale:
        if self._hook is not None:
            raise Error("gradient_noise_scale: this one is in use already; make another one")
        if vars(self._model).get("_noise_scale") is not None:
            raise Error(
                "gradient_noise_scale: this model is being measured already; leave that block first"
            )
        self._why_not = self._refused()
        if self._why_not:
            self._give_up(self._why_not)
            return self
        vars(self._model)["_noise_scale"] = self
        self._hook = self._begin()
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self._stop()
        if kind is None:
            self._take(needs_one=False)

    def _stop(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
            vars(self._model)["_noise_scale"] = None

    def _give_up(self, why: str) -> None:
        """Training goes on without being measured."""
        self._stop()
        self._why_not = why
        warnings.warn(f"gradient_noise_scale measures nothing more: {why}", stacklevel=4)

    def _samples(self, inputs: Any, kwargs: Any) -> int:
        if self._batch_size is not None:
            return self._batch_size
        for tensor in tensors_in([inputs, kwargs]):
            if tensor.dim() > 0 and len(tensor) > 0:
                return len(tensor)
        return 0

    def _take(self, needs_one: bool = True) -> None:
        for small, large in self._new():
            result = estimates(small, large)
            if all(map(math.isfinite, result)):
                self._steps.append(result)
            else:
                self._dropped += 1
        if needs_one and not self._steps and not self._why_not:
            raise Error(
                "gradient_noise_scale: no step was measured yet; run forward and backward of the "
                "model within the block"
            )


def has_old_gradients(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether gradients were not zeroed. Looks only at the smallest parameter, which is cheap."""
    smallest = min(parameters, key=torch.Tensor.numel)
    return smallest.grad is not None and bool(smallest.grad.any())


def squared_norm(parameters: Sequence[torch.Tensor]) -> float:
    """Of the gradients that there are."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norms = torch._foreach_norm(gradients) if gradients else []
    return math.fsum(float(norm) ** 2 for norm in norms)


def variance_of_mean(batches: Sequence[int]) -> float:
    """Of the mean of means over each batch, in units of the variance of one sample's gradient."""
    return math.fsum(1 / size for size in batches) / len(batches) ** 2
