"""DCP's async_save, in a thread or a process, with a gloo group of its own; its directories' fsync is added."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.optim import Optimizer

from benchmarks.rivals.base import Handle
from benchmarks.rivals.dcp import Dcp


class DcpThread(Dcp):
    """A fresh copy each save, as is the default."""

    name = "DCP async thread"
    how = "dcp.async_save in a thread, default staging; dcp.load"
    kind = AsyncCheckpointerType.THREAD
    stager: DefaultStager | None = None

    def prepare(self, folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
        super().prepare(folder, model, optimizer)
        self.group = dist.new_group([0], backend="gloo")

    def save(self, step: int) -> Handle:
        path = self.step_folder(step)
        pending: Any = dcp.async_save(
            self.state(),
            checkpoint_id=path,
            process_group=self.group,
            async_checkpointer_type=self.kind,
            async_stager=self.stager,
        )
        future = getattr(pending, "upload_completion", pending)
        return Handle(finish=future.result, path=path)

    def close(self) -> None:
        if self.stager is not None:
            self.stager.close()
        super().close()


class DcpThreadKept(DcpThread):
    """One stager for all saves: memory is kept and reused. Without CUDA its other options are refused."""

    name = "DCP async thread, stager kept"
    how = "dcp.async_save in a thread, one DefaultStager in shared memory for all saves; dcp.load"

    def prepare(self, folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
        super().prepare(folder, model, optimizer)
        self.stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False
            )
        )


class DcpProcess(DcpThreadKept):
    """The copy is handed to a process."""

    name = "DCP async process"
    how = "dcp.async_save in a process, one DefaultStager in shared memory for all saves; dcp.load"
    kind = AsyncCheckpointerType.PROCESS
