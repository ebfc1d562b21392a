"""``gradient_noise_scale``: estimates the batch size above which more samples hardly help.

    with dpcore.gradient_noise_scale(model) as g:
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss(model(inputs), targets).backward()
            optimizer.step()
    print(g)  # gradient noise scale 126 samples (95%: 108 to 151), 200 steps

The simple noise scale of McCandlish et al. (An Empirical Model of Large-Batch Training, 2018,
appendix A.1) is B = tr(S) / |G|^2: the variance of one sample's gradient, over the square of the
true gradient. A gradient over b samples has the expected square |G|^2 + tr(S) / b, so two batch
sizes determine both. Data parallel training has two: a rank's own gradient, and the mean over
ranks. With one rank, the first accumulated batch is the smaller one.

Both numbers are noisy in one step, and the mean of their ratios would be biased, so they are summed
over steps and divided once.

Each gradient is read twice, which can take some percent of a step. The scale changes slowly, so by
default one step of ten is measured.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from dpcore.base.confidence import ratio_interval
from dpcore.ddp.data_parallel import DataParallel
from dpcore.ddp.wrapper.outputs import tensors_in
from dpcore.ddp.wrapper.parameters import comes_sparse, trained_parameters
from dpcore.errors import Error, Unsupported


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


class GradientNoiseScale:
    """The result of ``gradient_noise_scale``. Its numbers cover the measured steps since the block
    began, or the last ``window`` of them. A rank may read them alone, in the block or after it."""

    def __init__(
        self, model: DataParallel, window: int | None, every: int, batch_size: int | None
    ) -> None:
        self._model, self._every, self._batch_size = model, every, batch_size
        self._steps: deque[tuple[float, float]] = deque(maxlen=window)
        self._accumulated: list[int] = []  # the batches since the last averaged step
        self._first = math.nan  # the first batch's squared norm, in a world of one
        self._of_step: dict[int, tuple[int, Square | None]] = {}  # batches, and the first of them
        self._dropped = 0
        self._hook: Any = None
        self._reducer: Any = None
        self._begin: int | None = None  # the reducer's number of the first step within the block
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

    def __enter__(self) -> GradientNoiseScale:
        model: Any = self._model
        if self._hook is not None:
            raise Error("gradient_noise_scale: this one is in use already; make another one")
        if model.__dict__.get("_noise_scale") is not None:
            raise Error(
                "gradient_noise_scale: this model is being measured already; leave that block first"
            )
        self._reducer, self._begin = model._reducer, None
        self._why_not = why_not(model)
        if self._why_not:
            self._give_up(self._why_not)
            return self
        model.__dict__["_noise_scale"] = self
        self._hook = model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self._stop()
        if kind is None:
            self._take(needs_one=False)

    def _stop(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
            self._model.__dict__["_noise_scale"] = None

    def _give_up(self, why: str) -> None:
        """Training goes on without being measured."""
        self._stop()
        self._why_not = why
        warnings.warn(f"gradient_noise_scale measures nothing more: {why}", stacklevel=4)

    def _before_forward(self, model: Any, inputs: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        if model._join_config.enable:
            self._give_up(
                "within join(), ranks without inputs have no gradient of their own; measure "
                "before, or in whole epochs"
            )
            return
        samples = self._samples(inputs, kwargs)
        if samples == 0:
            self._give_up(
                "the model's inputs hold no tensor whose first dimension is the batch; say how "
                "many samples a forward takes on a rank, batch_size=32"
            )
            return
        before = self._accumulated
        alone = model.group.world_size == 1
        number, is_due = self._of_this_step(model._reducer)
        if not before and _has_old_gradients(model):
            self._give_up(
                "the gradients of the last step are still there, and those of this step would be "
                "added to them; call optimizer.zero_grad() in each step, and accumulate with "
                "model.no_sync()"
            )
            return
        if before and is_due and alone and len(before) == 1:
            self._first = _squared_norm(model._parameters_by_number)
        if not model.require_backward_grad_sync:
            before.append(samples)
            return
        batches, self._accumulated = [*before, samples], []
        if alone and len(batches) == 1:
            self._give_up(
                "in a world of one, a step has one gradient, and two batch sizes are needed. "
                "Accumulate two or more batches a step with model.no_sync(), or train on several "
                "ranks"
            )
            return
        if is_due:
            first = Square(self._first, 1 / batches[0]) if alone else None
            self._of_step[number] = (len(batches), first)
            # The mean of means over each batch.
            variance = math.fsum(1 / size for size in batches) / len(batches) ** 2
            self._reducer.measure_norms(variance)

    def _of_this_step(self, reducer: Any) -> tuple[int, bool]:
        """The step's number, and whether it is measured. The first in the block is."""
        if reducer is not self._reducer:  # refresh() was called
            self._reducer, self._begin, self._of_step = reducer, None, {}
        number: int = reducer.completed
        if self._begin is None:
            self._begin = number
        return number, (number - self._begin) % self._every == 0

    def _samples(self, inputs: Any, kwargs: Any) -> int:
        if self._batch_size is not None:
            return self._batch_size
        for tensor in tensors_in([inputs, kwargs]):
            if tensor.dim() > 0 and len(tensor) > 0:
                return len(tensor)
        return 0

    def _take(self, needs_one: bool = True) -> None:
        """Takes the norms that the reducer has measured since the last call."""
        for number, own, variance, mean in self._reducer.take_norms() if self._reducer else ():
            batches, first = self._of_step.pop(number, (1, None))
            for forgotten in [n for n in self._of_step if n < number]:
                del self._of_step[forgotten]
            large = Square(mean, variance / self._model.group.world_size)
            small = Square(own, variance)
            if first is not None:  # the accumulated gradient is the sum over its batches
                small, large = first, Square(mean / batches**2, variance)
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


def _squared_norm(parameters: Sequence[torch.Tensor]) -> float:
    gradients = [p.grad for p in parameters if p.grad is not None]
    norms = torch._foreach_norm(gradients) if gradients else []
    return math.fsum(float(norm) ** 2 for norm in norms)


def _has_old_gradients(model: Any) -> bool:
    """Whether gradients were not zeroed. Looks only at the smallest parameter, which is cheap."""
    smallest = min(model._parameters_by_number, key=torch.Tensor.numel)
    return smallest.grad is not None and bool(smallest.grad.any())


def gradient_noise_scale(
    model: DataParallel,
    *,
    window: int | None = None,
    every: int = 10,
    batch_size: int | None = None,
) -> GradientNoiseScale:
    """Measures the gradient noise scale of the steps of ``model`` within the block, on all ranks.

    Two ranks are needed, or accumulation with ``model.no_sync()``. Where something is missing, a
    warning says what, training goes on, and the value is nan. The loss is a mean over the
    batch; gradients are zeroed or dropped in each step.

    ``window``      the number of latest measured steps in the value; by default all.
    ``every``       measure every n-th step, beginning with the first. Measuring each step (1) takes
                    some percent of the time, every tenth some thousandths.
    ``batch_size``  samples of one forward on this rank; by default the first dimension of the
                    model's first tensor argument.

    >>> with dpcore.gradient_noise_scale(model, window=200) as g:  # doctest: +SKIP
    ...     train_one_epoch()
    >>> g.value, g.interval                                        # doctest: +SKIP
    (126.3, (108.1, 151.2))
    """
    if not isinstance(model, DataParallel):
        raise TypeError(
            f"gradient_noise_scale(model): a dpcore.DataParallel is needed, not a "
            f"{type(model).__name__}; it compares what ranks send with the mean that they get"
        )
    numbers = {"window": window, "every": every, "batch_size": batch_size}
    for name, number in numbers.items():
        is_whole = isinstance(number, int) and not isinstance(number, bool)
        is_sensible = is_whole and 0 < int(number or 0) < 2**31
        if not is_sensible and (number is not None or name == "every"):
            raise Unsupported(
                f"gradient_noise_scale: {name}={number!r}: it must be a whole number, at least 1"
            )
    return GradientNoiseScale(model, window, every, batch_size)


def why_not(model: Any) -> str:
    """Why this model cannot be measured; "" if it can."""
    if model._across is not None:
        return (
            f"under schedule='{model.schedule}' no rank has the mean of all gradients at the end "
            "of a step; measure with schedule='bucketed'"
        )
    if not model._reducer.is_exact:
        return f"schedule='{model.schedule}' averages nothing"
    if model._delayed is not None:
        return (
            "gradients of delay_all_reduce_named_params are in no bucket; measure without that "
            "argument"
        )
    sparse = comes_sparse(model.module, model._parameters_by_number)
    if any(sparse):
        trained = trained_parameters(model.module, model.parameters_to_ignore)
        name = trained[list(sparse).index(True)][0]
        return (
            f"the gradient of {name} is sparse, and in no bucket; make the layer with sparse=False"
        )
    return ""
