"""Lightning, with Relight in place of ModelCheckpoint. Kill it at any moment and run it again: the last line is the same."""

import os
import sys

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import relight
from relight.integrations.lightning import LightningCheckpoints


class Model(pl.LightningModule):
    """A small regression with dropout, a schedule and a validation loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1))

    def loss(self, batch):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)]


class Print(pl.Callback):
    """A line a step."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.is_global_zero:
            print(f"step {trainer.global_step:>5}  loss {outputs['loss'].item():.9f}", flush=True)

    def on_validation_end(self, trainer, pl_module):
        if trainer.is_global_zero and not trainer.sanity_checking:
            print(
                f"after {trainer.global_step:>4}  val_loss {trainer.callback_metrics['val_loss'].item():.9f}",
                flush=True,
            )


pl.seed_everything(0)
x = torch.randn(512, 8)
train = DataLoader(TensorDataset(x, x.sin().sum(1, keepdim=True)), batch_size=16, shuffle=True)
val = DataLoader(TensorDataset(x[:64], x[:64].sin().sum(1, keepdim=True)), batch_size=16)
path = sys.argv[1] if len(sys.argv) > 1 else "runs/lightning"
keep = relight.keep(last=3, best=1, metric="val_loss")  # relight:
checkpoints = LightningCheckpoints(path, save=relight.every(steps=5) | relight.best("val_loss"), keep=keep)  # relight:
trainer = pl.Trainer(
    max_epochs=8,
    accelerator="cpu",
    devices=int(os.environ.get("EXAMPLE_RANKS", "1")),
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[Print(), checkpoints],  # relight: in place of ModelCheckpoint
)
trainer.fit(Model(), train, val)
