"""What both kinds of steps have in common: an optimizer, its face, and the model that it steps."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from dpcore.errors import Error

if TYPE_CHECKING:
    from dpcore.ddp.wrapper.wrapped import Wrapped


class StepsOfModel:
    """Owned by the model and by its ``DistributedOptimizer``, and owns neither."""

    def __init__(self, face: Any, model: Wrapped) -> None:
        self._face, self._of_model = weakref.ref(face), weakref.ref(model)
        self._reducer, self._parameters = model._reducer, model._parameters_by_number
        self._optimizer: torch.optim.Optimizer = face.optimizer

    @property
    def _model(self) -> Wrapped:
        model = self._of_model()
        if model is None:
            raise Error(
                "DistributedOptimizer: the DataParallel model whose parameters it steps has been "
                "deleted; keep a reference to the model as long as the optimizer is used"
            )
        return model

    def is_in_use(self) -> bool:
        """See ``Steps``."""
        return self._face() is not None

    def is_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """See ``Steps``."""
        return optimizer is self._face() or optimizer is self._optimizer
