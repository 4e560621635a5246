"""Orbax on NumPy views of the tensors, with JAX on the CPU; every fsync is added."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from benchmarks.rivals.base import Base, Handle, flat_tensors

os.environ.setdefault("JAX_PLATFORMS", "cpu")


class Orbax(Base):
    """``Checkpointer`` with a ``PyTreeCheckpointHandler``."""

    name = "Orbax"
    how = "Checkpointer(PyTreeCheckpointHandler()) of NumPy views; restored arrays are copied into the live tensors"
    package = "orbax-checkpoint"
    kind = "Checkpointer"

    def prepare(self, folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
        import orbax.checkpoint as ocp

        super().prepare(folder, model, optimizer)
        self.checkpointer: Any = getattr(ocp, self.kind)(ocp.PyTreeCheckpointHandler())

    def _tree(self) -> dict[str, Any]:
        tensors = {
            name.replace(".", "/"): value.numpy() for name, value in flat_tensors(self.model, self.optimizer).items()
        }
        groups = [
            {k: v for k, v in group.items() if isinstance(v, int | float)}
            for group in self.optimizer.state_dict()["param_groups"]
        ]
        return {"tensors": tensors, "groups": groups}

    def save(self, step: int) -> Handle:
        path = self.step_folder(step)
        self.checkpointer.save(path, self._tree())
        return Handle(path=path)

    def load(self, model: nn.Module, optimizer: Optimizer) -> None:
        restored = self.checkpointer.restore(self.newest)
        with torch.no_grad():
            for name, tensor in flat_tensors(model, optimizer).items():
                tensor.copy_(torch.from_numpy(restored["tensors"][name.replace(".", "/")]))
        for group, values in zip(optimizer.param_groups, restored["groups"], strict=True):
            group.update(values)

    def close(self) -> None:
        self.checkpointer.close()


class OrbaxAsync(Orbax):
    """``AsyncCheckpointer``."""

    name = "Orbax async"
    how = (
        "AsyncCheckpointer(PyTreeCheckpointHandler()) of NumPy views; restored arrays are copied into the live tensors"
    )
    kind = "AsyncCheckpointer"

    def save(self, step: int) -> Handle:
        path = self.step_folder(step)
        self.checkpointer.save(path, self._tree())
        return Handle(finish=self.checkpointer.wait_until_finished, path=path)
