"""NVIDIA's resiliency extension: torch.save in a forked process; every fsync is added.

It calls ``torch.cuda.synchronize()`` unconditionally: replaced by nothing, in this process only, where there is no CUDA. Its persistent
worker would be handed live CPU memory, so the forked one is measured; its end has to be asked for in the training thread.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from benchmarks.rivals.base import Base, Handle, one_process_group


class Nvrx(Base):
    """``TorchAsyncCheckpoint(persistent_queue=False)``."""

    name = "NVRx async"
    how = "TorchAsyncCheckpoint(persistent_queue=False), a fork a save, CUDA's synchronize left out; torch.load, load_state_dict"
    package = "nvidia-resiliency-ext"

    def prepare(self, folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
        from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint

        one_process_group()
        super().prepare(folder, model, optimizer)
        if not torch.cuda.is_available():
            torch.cuda.synchronize = lambda device=None: None
        self.engine = TorchAsyncCheckpoint(persistent_queue=False)

    def save(self, step: int) -> Handle:
        path = self.step_folder(step)
        path.mkdir()
        self.engine.async_save(self.state(), path / "state.pt")
        return Handle(poll=self._ended, path=path)

    def _ended(self, blocking: bool) -> bool:
        self.engine.finalize_async_save(blocking=blocking, no_dist=True)
        return bool(self.engine._async_calls_queue.get_num_unfinalized_calls() == 0)

    def load(self, model: nn.Module, optimizer: Optimizer) -> None:
        state = torch.load(self.newest / "state.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def close(self) -> None:
        torch.distributed.destroy_process_group()
