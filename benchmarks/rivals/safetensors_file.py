"""safetensors for the tensors, torch.save for the optimizer's settings; the fsync is added."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from benchmarks.rivals.base import Base, Handle, flat_tensors


class SafetensorsFile(Base):
    """One file of tensors, one of small values."""

    name = "safetensors"
    how = "save_file of all tensors + torch.save of param_groups; loaded by copies into the live tensors"
    package = "safetensors"

    def save(self, step: int) -> Handle:
        from safetensors.torch import save_file

        path = self.step_folder(step)
        path.mkdir()
        save_file(flat_tensors(self.model, self.optimizer), path / "state.safetensors")
        torch.save(self.optimizer.state_dict()["param_groups"], path / "small.pt")
        return Handle(path=path)

    def load(self, model: nn.Module, optimizer: Optimizer) -> None:
        from safetensors import safe_open

        live = flat_tensors(model, optimizer)
        with safe_open(self.newest / "state.safetensors", "pt") as file, torch.no_grad():
            for name, tensor in live.items():
                tensor.copy_(file.get_tensor(name))
        groups = torch.load(self.newest / "small.pt", weights_only=True)
        optimizer.load_state_dict({**optimizer.state_dict(), "param_groups": groups})
