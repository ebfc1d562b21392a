"""``strategy="dpcore"`` of Lightning and Fabric, against one process that has all batches."""

import csv
import importlib
import importlib.util
import os
import socket
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import dpcore
from tests.ranks import python

is_missing = importlib.util.find_spec("lightning") is None  # to import it takes seconds
pytestmark = [
    pytest.mark.skipif(is_missing, reason="needs Lightning: pip install lightning"),
    pytest.mark.usefixtures("mistakes_are_errors"),
]
RATE = 0.1


def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def batches_of(rank, uneven):
    """Rank 0 has three batches, rank 1 as many or two more."""
    count = 3 + 2 * rank * uneven
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(2, 3, generator=generator) for _ in range(count)]


def alone(uneven):
    """The parameters after the steps of two ranks, made by one process."""
    model = network()
    both = [batches_of(rank, uneven) for rank in range(2)]
    for step in range(max(map(len, both))):
        now = [batches[step] for batches in both if step < len(batches)]
        (sum(model(x).square().mean() for x in now) / 2).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= RATE * parameter.grad
                parameter.grad = None
    return model.state_dict()


def module_of(by_hand=False):
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.network = network()
            self.automatic_optimization = not by_hand
            self.steps = self.means = 0

        def training_step(self, x):
            self.steps += 1
            loss = self.network(x).square().mean()
            self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
            if by_hand:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

        def validation_step(self, x):
            self.log("rank", float(self.global_rank), sync_dist=True, batch_size=1)

        def on_validation_epoch_end(self):
            assert isinstance(self.trainer.strategy.model, dpcore.DataParallel)
            assert dist.get_backend() == "dpcore"

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=RATE)

    return Module()


def trainer_with(strategy="dpcore", **more):
    from lightning.pytorch import Trainer

    return Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **{"max_epochs": 1} | more,
    )


def trained(uneven, by_hand, folder):
    rank = int(os.environ["RANK"])
    loaders = [
        torch.utils.data.DataLoader(batches_of(rank, uneven), batch_size=None, shuffle=False)
        for _ in range(2)
    ]
    trainer = trainer_with(logger=False, enable_checkpointing=not by_hand, default_root_dir=folder)
    module = module_of(by_hand)
    trainer.fit(module, *loaders)
    assert module.steps == 3 + 2 * uneven
    assert trainer.callback_metrics["rank"] == len(batches_of(1, uneven)) / (6 + 2 * uneven)
    return {name: value.clone() for name, value in module.network.state_dict().items()}


def watched(folder):
    """What the callback says: with a logger of Lightning's, and without one."""
    from lightning.pytorch.loggers import CSVLogger

    from dpcore.lightning import OverlapMonitor

    loader = torch.utils.data.DataLoader(batches_of(0, False) * 4, batch_size=None)
    said, short = [], []
    logger = CSVLogger(folder)
    for of_trainer, callback in (
        ({"logger": logger, "log_every_n_steps": 4}, OverlapMonitor()),
        ({"logger": False}, OverlapMonitor(4, said.append)),
        ({"logger": False, "max_steps": 3}, OverlapMonitor(to=short.append)),
    ):
        trainer_with(enable_checkpointing=False, callbacks=[callback], **of_trainer).fit(
            module_of(), loader
        )
        assert callback.monitor.last["step"] == of_trainer.get("max_steps", 8)
    if os.environ["RANK"] == "0":
        rows = csv.DictReader(Path(logger.log_dir, "metrics.csv").read_text().splitlines())
        logged = [row for row in rows if row["dpcore/exposed_ms"]]
        assert [row["step"] for row in logged] == ["5", "9"]
        assert [figures["step"] for figures in said] == [4, 8]
        assert [figures["steps"] for figures in short] == [2]


def watched_in_a_block(comm, folder):
    """A LightningModule that enters its block of local updates, and a trainer within one."""
    from lightning.pytorch import Trainer

    from dpcore.lightning import OverlapMonitor

    def block_around(module, optimizer):
        return dpcore.LocalSGD(module, optimizer, sync_every=2, comm=comm)

    class InABlock(type(module_of())):
        def on_train_start(self):
            self.block = block_around(self, self.optimizers().optimizer).__enter__()

        def on_train_end(self):
            self.block.__exit__(None, None, None)

    class Around(type(module_of())):
        def configure_optimizers(self):
            return self.optimizer

    told, made = [], []
    loader = torch.utils.data.DataLoader(batches_of(comm.rank, False) * 4, batch_size=None)

    def fit(module):
        module.log = lambda *_, **__: None  # its sum over ranks is of another group
        callback = OverlapMonitor(4, told.append)
        made.append(callback)
        trainer = Trainer(
            accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, max_epochs=1,
            enable_model_summary=False, enable_checkpointing=False, callbacks=[callback],
            default_root_dir=folder,
        )  # fmt: skip
        trainer.fit(module, loader)

    fit(InABlock())
    module = Around()
    module.optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    with block_around(module, module.optimizer):
        fit(module)
    for callback in made:
        last = callback.monitor.last
        assert last["step"] == 12 and last["communication_ms"] > 0 and last["bytes"] > 0
    assert [figures["step"] for figures in told] == [4, 8, 12] * 2 * (comm.rank == 0)


def of_two_players():
    """Two optimizers in turns. The first half of each batch stays on its rank for the moment."""
    from lightning.pytorch import LightningModule

    from dpcore.lightning import DpcoreStrategy

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.players = nn.ModuleList(network() for _ in range(2))

        def training_step(self, x):
            for player, optimizer in zip(self.players, self.optimizers(), strict=True):
                optimizer.zero_grad()
                with self.trainer.strategy.block_backward_sync():
                    self.manual_backward(player(x[:1]).square().mean() / 2)
                self.manual_backward(player(x[1:]).square().mean() / 2)
                optimizer.step()

        def configure_optimizers(self):
            return [torch.optim.SGD(player.parameters(), lr=RATE) for player in self.players]

    module = Module()
    loader = torch.utils.data.DataLoader(
        batches_of(int(os.environ["RANK"]), uneven=False), batch_size=None, shuffle=False
    )
    strategy = DpcoreStrategy(find_unused_parameters=True)
    trainer_with(strategy=strategy, logger=False, enable_checkpointing=False).fit(module, loader)
    return module.players


def goes_on_where_it_cannot_measure():
    from lightning.pytorch import Trainer

    from dpcore.lightning import OverlapMonitor

    def trained(callback=None, **options):
        callbacks = [callback or OverlapMonitor()]
        trainer = Trainer(
            accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, max_epochs=1,
            enable_model_summary=False, enable_checkpointing=False, callbacks=callbacks,
            **options,
        )  # fmt: skip
        loader = torch.utils.data.DataLoader(batches_of(0, False), batch_size=None)
        trainer.fit(module_of(), loader)
        return trainer.global_step

    with pytest.warns(UserWarning, match='measures nothing: .* train with strategy="dpcore"'):
        assert trained() > 0
    told = []
    try:
        with mock.patch.dict(os.environ):
            steps = trained(OverlapMonitor(2, told.append), strategy="ddp")
        assert told[-1]["step"] <= steps and told[-1]["step_ms"] > 0
    finally:
        dist.destroy_process_group()
    on_gpu = property(lambda model: "cuda", lambda model, value: None)
    try:
        with (
            mock.patch.object(dpcore.DataParallel, "device_type", on_gpu, create=True),
            mock.patch.dict(os.environ),
            pytest.warns(UserWarning, match="does not say when its operations run on cuda"),
        ):
            assert trained(strategy="dpcore") > 0
    finally:
        dist.destroy_process_group()  # Lightning leaves it to the end of the process


def trained_by_fabric():
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=2, strategy="dpcore")
    fabric.launch()
    model = network()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=RATE))
    assert isinstance(model._forward_module, dpcore.DataParallel)
    assert fabric.all_reduce(torch.tensor(float(fabric.global_rank))) == 0.5
    for x in batches_of(fabric.global_rank, uneven=False):
        optimizer.zero_grad()
        fabric.backward(model(x).square().mean())
        optimizer.step()
    return dict(model.module.state_dict())


def trained_by_fabric_and_hand():
    """A ``training_step`` with ``manual_backward``, which Fabric runs as the wrapper's forward."""
    from lightning.fabric import Fabric
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.network = network()

        def training_step(self, x):
            self.manual_backward(self.network(x).square().mean())

    fabric = Fabric(accelerator="cpu", devices=2, strategy="dpcore")
    fabric.launch()
    module = Module()
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=RATE))
    for x in batches_of(fabric.global_rank, uneven=False):
        optimizer.zero_grad()
        model.training_step(x)
        optimizer.step()
    return dict(module.network.state_dict())


def thawed_by_a_callback(strategy="dpcore"):
    """The first layer learns from the second epoch on, as Lightning's callback says."""
    from lightning.pytorch.callbacks import BaseFinetuning

    class Thaw(BaseFinetuning):
        def freeze_before_training(self, pl_module):
            self.freeze(pl_module.network[0])

        def finetune_function(self, pl_module, epoch, optimizer):
            if epoch == 1:
                self.unfreeze_and_add_param_group(pl_module.network[0], optimizer, lr=RATE)

    batches = batches_of(int(os.environ["RANK"]), uneven=False)
    loader = torch.utils.data.DataLoader(batches, batch_size=None, shuffle=False)
    module = module_of()
    module.configure_optimizers = lambda: torch.optim.SGD(
        [p for p in module.parameters() if p.requires_grad], lr=RATE
    )
    more = {"logger": False, "enable_checkpointing": False, "max_epochs": 2}
    trainer_with(strategy, callbacks=[Thaw()], **more).fit(module, loader)
    return dict(module.network.state_dict())


def thawed_alone():
    model = network()
    for epoch in range(2):
        for both in zip(*(batches_of(rank, False) for rank in range(2)), strict=True):
            (sum(model(x).square().mean() for x in both) / 2).backward()
            with torch.no_grad():
                for parameter in (model if epoch else model[1:]).parameters():
                    parameter -= RATE * parameter.grad
                model.zero_grad()
    return dict(model.state_dict())


def metrics_over_all_ranks():
    """Of torchmetrics, by itself: the second rank has seen more."""
    import torchmetrics

    rank = dist.get_rank()
    mean, seen = torchmetrics.MeanMetric(), torchmetrics.CatMetric()
    for value in range(2 + rank):
        mean.update(float(10 * rank + value))
        seen.update(float(10 * rank + value))
    assert mean.compute().item() == pytest.approx((0 + 1 + 10 + 11 + 12) / 5)
    assert seen.compute().tolist() == [0, 1, 10, 11, 12]


def body(comm, port, folder):
    rank = comm.rank
    warnings.simplefilter("ignore")
    importlib.import_module("dpcore.lightning")
    watched_in_a_block(comm, folder)
    dpcore.finalize()

    # What torchrun says to a rank.
    said = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    said |= {"GROUP_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({k: str(v) for k, v in said.items()}, TORCHELASTIC_RUN_ID="test")
    for uneven, by_hand in ((False, False), (True, False), (True, True)):
        values = trained(uneven, by_hand, folder)
        torch.testing.assert_close(values, alone(uneven))
    for player in of_two_players():
        torch.testing.assert_close(dict(player.state_dict()), dict(alone(uneven=False)))
    watched(folder)
    torch.testing.assert_close(thawed_by_a_callback(), thawed_alone())
    mine = thawed_by_a_callback("ddp_find_unused_parameters_true")["0.weight"]
    values = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(values, mine)
    assert not torch.allclose(*values, rtol=1e-3)
    torch.testing.assert_close(trained_by_fabric(), alone(uneven=False))
    torch.testing.assert_close(trained_by_fabric_and_hand(), alone(uneven=False))
    metrics_over_all_ranks()
    dist.destroy_process_group()


def free_port():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def test_lightning_and_fabric(tmp_path):
    """Also with two batches more on one rank, where Lightning's own strategy hangs."""
    dpcore.spawn(body, 2, free_port(), str(tmp_path))


def test_the_monitor_never_ends_a_training():
    importlib.import_module("dpcore.lightning")
    goes_on_where_it_cannot_measure()


def test_without_lightning():
    code = "import sys; sys.modules['lightning'] = None; import dpcore.lightning"
    out = python.run("-c", code, capture_output=True, text=True)
    assert "dpcore.lightning needs Lightning: pip install lightning" in out.stderr


def test_lengths_of_loaders_are_compared_where_the_group_works(monkeypatch):
    """NCCL takes no tensors of the CPU."""
    ours = importlib.import_module("dpcore.lightning")
    from types import SimpleNamespace

    class OnADevice(ours.DpcoreStrategy):
        root_device, world_size = torch.device("meta"), 2
        lightning_module = SimpleNamespace(trainer=SimpleNamespace(training=True))

    class Gathered(Exception):
        """Far enough."""

    def all_gather(outputs, own):
        assert [tensor.device.type for tensor in (*outputs, own)] == ["meta"] * 3
        raise Gathered

    monkeypatch.setattr(dist, "all_gather", all_gather)
    with pytest.raises(Gathered):
        OnADevice().process_dataloader([1, 2])
