"""Lightning's AsyncCheckpointIO; every fsync is added."""

from __future__ import annotations

from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from benchmarks.rivals.base import Base, Handle


class LightningAsync(Base):
    """AsyncCheckpointIO as the Trainer uses it: a clone of every tensor, torch.save in a thread."""

    name = "Lightning async"
    how = "AsyncCheckpointIO(TorchCheckpointIO()) of both state dicts; load_checkpoint, load_state_dict"
    package = "pytorch-lightning"

    def prepare(self, folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
        from lightning_fabric.plugins import TorchCheckpointIO
        from pytorch_lightning.plugins.io import AsyncCheckpointIO

        super().prepare(folder, model, optimizer)
        self.io = AsyncCheckpointIO(TorchCheckpointIO())

    def save(self, step: int) -> Handle:
        path = self.step_folder(step)
        path.mkdir()
        self.io.save_checkpoint(self.state(), path / "state.ckpt")
        return Handle(finish=self._finish, path=path)

    def _finish(self) -> None:
        assert self.io._executor is not None
        self.io._executor.submit(int).result()  # it gives no future; its one worker takes this after the save
        if self.io._error is not None:
            raise self.io._error

    def load(self, model: nn.Module, optimizer: Optimizer) -> None:
        state = self.io.load_checkpoint(self.newest / "state.ckpt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def close(self) -> None:
        self.io.teardown()
