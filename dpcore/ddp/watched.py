"""Models that are no ``DataParallel``, as ``monitor`` and ``measure_overlap`` look at them.

They read a few attributes of a ``DataParallel``; ``OfTorch`` gives those of torch's
DistributedDataParallel, and ``OfLocalUpdates`` those of a block of LocalSGD or DiLoCo. Torch's
reducer notes when the last gradient and the last bucket of a step came, if it is told to do so for
every step. It does not note each bucket: its communication lasts from the first bucket that it
sends until the last one is there.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dpcore.comm.communicators.torch_group import TorchCommunicator
from dpcore.ddp.data_parallel import DataParallel
from dpcore.ddp.local_updates.block import LocalUpdates
from dpcore.ddp.wrapper.model_group import ModelGroup

_USUAL_RATE = 100  # torch's: of so many steps one is noted

Sums = tuple[int, int, int, int, int]  # backwards, and of all: computing, waiting, sending, bytes


class OfTorch:
    """A ``DistributedDataParallel`` of torch."""

    is_exact = True
    schedule = "torch DDP"
    steps_together = 1

    def __init__(self, model: DistributedDataParallel) -> None:
        self.owner: Any = model
        self.device = next(model.parameters()).device
        self.device_type, self.backend = self.device.type, dist.get_backend(model.process_group)
        self.group = TorchCommunicator(model.process_group)
        self._model_group = ModelGroup(self.group, model)
        self._mistakes = SimpleNamespace(notes=[])
        self._reducer = self
        self._sums: Sums = (0, 0, 0, 0, 0)

    @property
    def require_backward_grad_sync(self) -> bool:
        return bool(self.owner.require_backward_grad_sync)

    @property
    def require_forward_param_sync(self) -> bool:
        return bool(self.owner.require_forward_param_sync)

    @require_forward_param_sync.setter
    def require_forward_param_sync(self, value: bool) -> None:
        self.owner.require_forward_param_sync = value

    @property
    def _join_config(self) -> Any:
        return self.owner._join_config

    def zero_grad(self) -> None:
        self.owner.zero_grad()

    def no_sync(self) -> Any:
        return self.owner.no_sync()

    # ---- as the reducer of a DataParallel ----------------------------------------------------

    def wait_for_gradients(self) -> None:
        """Backward has waited."""

    def watch(self, on: bool) -> None:
        is_on = on or vars(self.owner).get("_monitor") is not None
        self.owner._set_ddp_runtime_logging_sample_rate(1 if is_on else _USUAL_RATE)

    def sums(self) -> Sums:
        """With the steps that have ended since the last call; only the last one of them is known,
        so it is called after each."""
        self.owner.logger.set_runtime_stats_and_log()
        found = self.owner._get_ddp_logging_data()
        number = found.get("iteration", 0)
        if number != self._sums[0]:
            _, computed, waited, sent, size = self._sums
            forward, backward, communication, hidden = (
                max(0, found.get(name, 0))
                for name in (
                    "forward_compute_time",
                    "backward_compute_time",
                    "backward_comm_time",
                    "backward_compute_comm_overlap_time",
                )
            )
            self._sums = (
                number,
                computed + forward + backward,
                waited + max(0, communication - hidden),
                sent + communication,
                size + found.get("total_parameter_size_bytes", 0),
            )
        return self._sums


class OfLocalUpdates:
    """The block of a LocalSGD or DiLoCo. Only one of many steps sends something, so those of an
    interval are told as their mean."""

    is_exact = True  # at the end of an interval
    require_backward_grad_sync = True
    schedule = "local updates"

    def __init__(self, block: LocalUpdates) -> None:
        self.owner: Any = block
        self.steps_together = block.sync_every
        self.device = block._flat.device
        self._model_group, self.group = block._model_group, block.group
        self.device_type = self.device.type
        self.backend = type(self.group).__name__
        self._mistakes = SimpleNamespace(notes=[])
        self._join_config = SimpleNamespace(enable=False)
        self._reducer = self

    def zero_grad(self) -> None:
        self.owner.module.zero_grad()

    def watch(self, on: bool) -> None:
        """A block always counts."""

    def sums(self) -> Sums:
        """What is not waiting counts as computing."""
        counted = self.owner._counts
        computed = time.monotonic_ns() - counted.waited_ns
        return (
            self.owner._steps,
            computed,
            counted.waited_ns,
            counted.in_flight_ns,
            counted.sent_bytes,
        )


def face_of(model: Any) -> Any:
    """What is watched in the place of the model: a ``DataParallel`` itself; None for what cannot be
    watched."""
    if isinstance(model, DataParallel):
        return model
    if isinstance(model, DistributedDataParallel):
        return OfTorch(model)
    return OfLocalUpdates(model) if isinstance(model, LocalUpdates) else None


def owner_of(face: Any) -> Any:
    """The model that a face is of."""
    return face.owner if isinstance(face, OfTorch | OfLocalUpdates) else face


def before_each_step(face: Any, call: Callable[..., None]) -> Any:
    """Calls it where steps begin, until the result is removed: before forward, or after the former
    step of the optimizer whose steps a block counts. The block's module may never be called itself,
    as a LightningModule isn't."""
    if isinstance(face, OfLocalUpdates):
        return face.owner._counted.register_step_post_hook(call)
    return owner_of(face).register_forward_pre_hook(call)
