"""torch.distributed.checkpoint, synchronous. It fsyncs its files; its directories' fsync is added."""

from __future__ import annotations

from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.optim import Optimizer

from benchmarks.rivals.base import Base, Handle, one_process_group


class Dcp(Base):
    """``dcp.save`` of both state dicts, ``dcp.load`` into them."""

    name = "DCP"
    how = "dcp.save of both state dicts, a world of one; dcp.load into the live tensors"

    def prepare(self, folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
        one_process_group()
        super().prepare(folder, model, optimizer)

    def save(self, step: int) -> Handle:
        path = self.step_folder(step)
        dcp.save(self.state(), checkpoint_id=path)
        return Handle(path=path)

    def load(self, model: nn.Module, optimizer: Optimizer) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=self.newest)  # tensors in place
        optimizer.load_state_dict(state["optimizer"])  # type: ignore[arg-type]

    def close(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()
