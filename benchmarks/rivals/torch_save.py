"""torch.save to a file; its fsync is added."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from benchmarks.rivals.base import Base, Handle


class TorchSave(Base):
    """torch.save as most scripts use it."""

    name = "torch.save"
    how = "torch.save of both state dicts; torch.load(weights_only=True), load_state_dict"

    def save(self, step: int) -> Handle:
        path = self.step_folder(step)
        path.mkdir()
        torch.save(self.state(), path / "state.pt")
        return Handle(path=path)

    def load(self, model: nn.Module, optimizer: Optimizer) -> None:
        state = torch.load(self.newest / "state.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
