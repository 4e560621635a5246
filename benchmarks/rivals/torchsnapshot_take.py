"""torchsnapshot, whole and asynchronous; every fsync is added."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from benchmarks.rivals.base import Base, Handle


class Take(Base):
    """``Snapshot.take`` and ``restore``."""

    name = "torchsnapshot take"
    how = "Snapshot.take of model and optimizer; Snapshot.restore"
    package = "torchsnapshot"

    def save(self, step: int) -> Handle:
        from torchsnapshot import Snapshot

        path = self.step_folder(step)
        Snapshot.take(str(path), {"model": self.model, "optimizer": self.optimizer})
        return Handle(path=path)

    def load(self, model: nn.Module, optimizer: Optimizer) -> None:
        from torchsnapshot import Snapshot

        Snapshot(str(self.newest)).restore({"model": model, "optimizer": optimizer})


class AsyncTake(Take):
    """``Snapshot.async_take``."""

    name = "torchsnapshot async_take"
    how = "Snapshot.async_take of model and optimizer; Snapshot.restore"

    def save(self, step: int) -> Handle:
        from torchsnapshot import Snapshot

        path = self.step_folder(step)
        pending = Snapshot.async_take(str(path), {"model": self.model, "optimizer": self.optimizer})
        return Handle(finish=pending.wait, path=path)
