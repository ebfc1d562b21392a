"""``gradient_noise_scale``: estimates the batch size above which more samples hardly help.

    with dpcore.gradient_noise_scale(model) as g:
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss(model(inputs), targets).backward()
            optimizer.step()
    print(g)  # gradient noise scale 126 samples (95%: 108 to 151), 200 steps

``estimate.py`` says what it is. Each gradient is read twice, which can take some percent of a step.
The scale changes slowly, so by default one step of ten is measured.
"""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from dpcore.ddp.data_parallel import DataParallel
from dpcore.ddp.local_updates.block import LocalUpdates
from dpcore.ddp.noise_scale.estimate import GradientNoiseScale, Square, estimates
from dpcore.ddp.noise_scale.of_local_updates import OfLocalUpdates
from dpcore.ddp.noise_scale.of_reducer import OfReducer
from dpcore.ddp.noise_scale.of_torch import OfTorch
from dpcore.ddp.wrapper.arguments import refuse_virtual
from dpcore.errors import Unsupported

__all__ = ["GradientNoiseScale", "Square", "estimates", "gradient_noise_scale"]


_KINDS: tuple[tuple[type, type[GradientNoiseScale]], ...] = (
    (DataParallel, OfReducer),
    (DistributedDataParallel, OfTorch),
    (LocalUpdates, OfLocalUpdates),
)


def gradient_noise_scale(
    model: Any,
    *,
    window: int | None = None,
    every: int = 10,
    batch_size: int | None = None,
) -> GradientNoiseScale:
    """Measures the gradient noise scale of the steps of ``model`` within the block, on all ranks.

    ``model`` is a ``dpcore.DataParallel``, a ``DistributedDataParallel`` of torch, or the block of
    a ``dpcore.LocalSGD`` or ``DiLoCo``, of which the updates between two syncs are measured.

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
    numbers = {"window": window, "every": every, "batch_size": batch_size}
    for name, number in numbers.items():
        is_whole = isinstance(number, int) and not isinstance(number, bool)
        is_sensible = is_whole and 0 < int(number or 0) < 2**31
        if not is_sensible and (number is not None or name == "every"):
            raise Unsupported(
                f"gradient_noise_scale: {name}={number!r}: it must be a whole number, at least 1"
            )
    refuse_virtual(model, "gradient_noise_scale")
    for kind, measures in _KINDS:
        if isinstance(model, kind):
            return measures(model, window, every, batch_size)
    raise TypeError(
        f"gradient_noise_scale(model): a dpcore.DataParallel is needed, not a "
        f"{type(model).__name__}; a DistributedDataParallel of torch, a LocalSGD or a DiLoCo do as "
        "well. It compares what ranks send with the mean that they get"
    )
