"""``import dpcore.lightning`` and Lightning knows ``strategy="dpcore"``.

    import dpcore.lightning
    from lightning.pytorch import Trainer

    Trainer(accelerator="cpu", devices=2, strategy="dpcore").fit(module, loader)

It is Lightning's DDP strategy with ``dpcore.DataParallel`` instead of torch's DDP; Lightning's
own collectives (``self.log(..., sync_dist=True)``, barriers) run over the backend "dpcore" as well
where tensors are on the CPU. Fabric knows the word, too. With arguments of ``DataParallel``:
``strategy=dpcore.lightning.DpcoreStrategy(deterministic=True)``.

Ranks whose loaders have different lengths train to the end of the longest one: a rank that has run
out repeats its last batch, and its gradients count as zeros. The mean is over all ranks, as
in ``model.join()``, and every rank makes the same steps, so nothing that Lightning calls on all
ranks (logs, validation, checkpoints) meets something else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

try:
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.fabric.strategies.ddp import DDPStrategy as FabricDDPStrategy
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
    from lightning.pytorch.utilities.rank_zero import rank_zero_warn
except ModuleNotFoundError as missing:
    if missing.name is None or missing.name.split(".")[0] != "lightning":
        raise
    raise ModuleNotFoundError(
        "dpcore.lightning needs Lightning: pip install lightning", name="lightning"
    ) from None

from dpcore.ddp.data_parallel import DataParallel
from dpcore.ddp.local_updates.checks import unwrapped
from dpcore.ddp.mistakes.observer import in_blocks
from dpcore.ddp.monitor import Monitor, monitor
from dpcore.errors import Error, Unsupported
from dpcore.recorder.step_figures import numbers_of

__all__ = ["DpcoreFabricStrategy", "DpcoreStrategy", "OverlapMonitor"]


def _backend(asked: str | None, device: torch.device) -> str | None:
    """The backend of torch.distributed: ours for the CPU, Lightning's choice for others."""
    return "dpcore" if asked is None and device.type == "cpu" else asked


class EvenLoader:
    """A loader that gives ``steps`` batches, the last of its own again and again where it has
    fewer. ``repeats`` says whether the batch that was given last is such a one."""

    def __init__(self, loader: Any, steps: int) -> None:
        self._loader, self._steps = loader, steps
        self.repeats = False

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[Any]:
        self.repeats = False
        given, batch = 0, None
        for batch in self._loader:
            given += 1
            yield batch
        for _ in range(given, self._steps):
            self.repeats = True
            yield batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)  # its sampler, its dataset, ...


class DpcoreStrategy(DDPStrategy):
    """For ``lightning.pytorch.Trainer``. Takes the arguments of Lightning's ``DDPStrategy``; what
    that one hands on to torch's DDP goes to ``dpcore.DataParallel``."""

    strategy_name = "dpcore"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._even: EvenLoader | None = None

    def _setup_model(self, model: torch.nn.Module) -> DataParallel:
        return DataParallel(model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs)

    def _get_process_group_backend(self) -> str:
        self._process_group_backend = _backend(self._process_group_backend, self.root_device)
        return super()._get_process_group_backend()

    def process_dataloader(self, dataloader: object) -> object:
        """Makes the ranks' training loaders equally long, if there is one loader and lengths
        differ."""
        loader = super().process_dataloader(dataloader)
        trainer = self.lightning_module.trainer if self.lightning_module is not None else None
        if trainer is None or not trainer.training:
            return loader
        self._even = None
        try:
            length = len(loader)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):
            length = -1  # unknown: all ranks compare lengths, and then nothing is wrapped
        own = torch.tensor([length], device=self.root_device)  # NCCL takes no other
        lengths = [torch.zeros_like(own) for _ in range(self.world_size)]
        torch.distributed.all_gather(lengths, own)
        known = [int(other) for other in lengths]
        if min(known) < 1 or min(known) == max(known):
            return loader
        self._even = EvenLoader(loader, max(known))
        return self._even

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Takes in what a callback has thawed on all ranks, as ``BaseFinetuning`` does."""
        if isinstance(self.model, DataParallel) and self.model._watch.has_thawed():
            self.model.refresh()

    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self._even is not None and self._even.repeats:
            closure_loss = closure_loss * 0
        return super().backward(closure_loss, *args, **kwargs)

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        """Manual optimization runs backward within the wrapper's forward, at whose end gradients
        are expected otherwise."""
        module = self.lightning_module
        is_manual = module is not None and not module.automatic_optimization
        if is_manual and isinstance(self.model, DataParallel):
            self.model.reducer.prepare_for_backward(closure_loss)

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        """Lightning's makes up for what torch's reducer misses of a static graph."""

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        strategy_registry.register("dpcore", cls, description="dpcore.DataParallel", override=True)


class DpcoreFabricStrategy(FabricDDPStrategy):
    """For ``lightning.fabric.Fabric``, with the arguments of Fabric's ``DDPStrategy``."""

    def setup_module(self, module: torch.nn.Module) -> DataParallel:
        return DataParallel(module, device_ids=self._determine_ddp_device_ids(), **self._ddp_kwargs)

    def _get_process_group_backend(self) -> str:
        self._process_group_backend = _backend(self._process_group_backend, self.root_device)
        return super()._get_process_group_backend()

    def backward(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Also within the wrapper's forward: a ``training_step`` with ``manual_backward``."""
        running = DistributedDataParallel._active_ddp_module
        if isinstance(running, DataParallel):
            running.reducer.prepare_for_backward(tensor)
        super().backward(tensor, *args, **kwargs)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        strategy_registry.register("dpcore", cls, description="dpcore.DataParallel", override=True)


class OverlapMonitor(Callback):
    """``dpcore.monitor`` as a callback: ``Trainer(..., callbacks=[OverlapMonitor()])``.

    What steps cost goes to the trainer's loggers as ``dpcore/exposed_ms`` and so on, or, where it
    has none, to stdout. ``log_every_n_steps``: by default that of the trainer. ``to``: another
    place for them, as in ``dpcore.monitor``. A training that ends before its first line gets one
    at its end. Under a strategy for one device it watches the block of ``dpcore.LocalSGD`` or
    ``DiLoCo`` that counts the steps of the trainer's optimizer. Where it can't measure, as under
    another strategy, it says so and trains on.
    """

    def __init__(self, log_every_n_steps: int | None = None, to: Any = None) -> None:
        self._every, self._to = log_every_n_steps, to
        self.monitor: Monitor | None = None
        self._has_begun = False

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.monitor, self._has_begun = None, False

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        """Before the first one: the module's own ``on_train_start`` may have entered a block."""
        if self._has_begun:
            return
        self._has_begun = True
        try:
            self.monitor = self._begin(trainer)
        except Error as problem:
            if type(problem) not in (Error, Unsupported):
                raise  # of a rank that has died, say, and of training as well
            rank_zero_warn(f"OverlapMonitor measures nothing: {problem}")

    def _begin(self, trainer: Any) -> Monitor:
        model = trainer.strategy.model
        if not isinstance(model, DataParallel | DistributedDataParallel):
            model = _block_of(trainer.optimizers)
        if model is None:
            raise Unsupported(
                "it watches dpcore.DataParallel and torch's DistributedDataParallel; train with "
                f'strategy="dpcore" or "ddp", not {type(trainer.strategy).__name__}, or enter a '
                "block of dpcore.LocalSGD or DiLoCo by the end of on_train_start"
            )

        def log(figures: dict[str, Any]) -> None:
            for logger in trainer.loggers:
                logger.log_metrics(numbers_of(figures), step=trainer.global_step)

        to = self._to if self._to is not None else log if trainer.loggers else "stdout"
        return monitor(model, self._every or trainer.log_every_n_steps or 50, to)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.monitor is not None:
            if self.monitor.lines == 0 and trainer.global_step > 1:
                self.monitor.figures()
            self.monitor.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self.monitor is not None:
            self.monitor.__exit__(type(exception))


def _block_of(optimizers: Iterable[Any]) -> Any:
    """The block of local updates around the steps of one of them, or None."""
    found = (in_blocks.get(unwrapped(optimizer)) for optimizer in optimizers)
    return next((block() for block in found if block is not None), None)


DpcoreStrategy.register_strategies(StrategyRegistry)
DpcoreFabricStrategy.register_strategies(STRATEGY_REGISTRY)
