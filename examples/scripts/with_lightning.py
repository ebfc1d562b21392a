"""Trains a LightningModule on two processes.

python examples/scripts/with_lightning.py
"""

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))

    def training_step(self, batch, batch_number):
        x, y = batch
        loss = nn.functional.cross_entropy(self.network(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_number):
        x, y = batch
        accuracy = (self.network(x).argmax(1) == y).float().mean()
        self.log("accuracy", accuracy, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def clouds(count, seed):
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (count,), generator=generator)
    x = torch.randn(count, 8, generator=generator)
    x[torch.arange(count), y] += 3
    return TensorDataset(x, y)


def main():
    L.seed_everything(0)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp_fork",
        max_epochs=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    train = DataLoader(clouds(512, 1), batch_size=16, shuffle=True)
    trainer.fit(Classifier(), train, DataLoader(clouds(256, 2), batch_size=16))
    if trainer.is_global_zero:
        print(f"accuracy {trainer.callback_metrics['accuracy'].item():.3f}")


if __name__ == "__main__":
    main()
