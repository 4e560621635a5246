"""Writes a ``.ckpt`` with Lightning's own Trainer, into a folder that is named."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint


class Lit(lightning.LightningModule):
    """A little module with an optimizer and a scheduler."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.ReLU(), torch.nn.Linear(width, 2))

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        """Return the loss."""
        loss = self.net(batch).square().mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> dict[str, object]:
        """Return Adam, and a scheduler that lowers the learning rate."""
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


def main(out: Path) -> None:
    """Train two epochs of three steps, and save."""
    lightning.seed_everything(5)
    model = Lit()
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        default_root_dir=out,
        callbacks=[ModelCheckpoint(dirpath=out, filename="last", monitor="train_loss")],
        enable_model_summary=False,
    )
    trainer.fit(model, torch.utils.data.DataLoader(torch.randn(6, 4), batch_size=2))
    for path in out.glob("*.ckpt"):
        path.unlink()
    trainer.save_checkpoint(out / "last.ckpt")
    torch.save({"model": model.state_dict(), "optimizer": trainer.optimizers[0].state_dict()}, out / "expected.pt")
    versions = {"lightning": lightning.__version__, "torch": torch.__version__, "seed": 5}
    (out / "versions.json").write_text(json.dumps(versions) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
