"""The interface of all rivals, and how their saves are made durable."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn
from torch.optim import Optimizer


class Handle:
    """A save under way. ``finish`` waits for the rival's own end. A thread then fsyncs what is below ``path``, as the
    rival
    does not. ``poll`` is for a rival that must be polled in the training thread; called with True it waits.
    """

    def __init__(
        self,
        *,
        finish: Callable[[], object] | None = None,
        path: Path | None = None,
        poll: Callable[[bool], bool] | None = None,
        known: Callable[[], float] | None = None,
    ) -> None:
        """``known`` gives the moment at which it was durable, for a rival that reports it."""
        self._finish, self._path, self._poll, self._known = finish, path, poll, known
        self._thread = threading.Thread(target=self._run, name="durable", daemon=True)
        self._error: BaseException | None = None
        self._ended = False
        self.durable_at = 0.0
        """``perf_counter`` at which everything, directories included, was on the disk."""

    def start(self) -> None:
        """Begin to watch the save, outside the time that counts as blocked."""
        if self._poll is None:
            self._ended = True
            self._thread.start()

    def done(self) -> bool:
        """Return whether the save is durable. Called once a step, in the training thread."""
        if not self._ended and self._poll is not None and self._poll(False):
            self._ended = True
            self._thread.start()
        return self._ended and not self._thread.is_alive() and self._check()

    def wait(self) -> None:
        """Wait until the save is durable."""
        if not self._ended and self._poll is not None:
            self._poll(True)
            self._ended = True
            self._thread.start()
        self._thread.join()
        self._check()

    def _check(self) -> bool:
        if self._error is not None:
            raise self._error
        return True

    def _run(self) -> None:
        try:
            if self._finish is not None:
                self._finish()
            if self._path is not None:
                fsync_tree(self._path)
            self.durable_at = self._known() if self._known is not None else time.perf_counter()
        except BaseException as error:
            self._error = error


class Rival(Protocol):
    """One way to save a model and an optimizer. Lives in a process of its own, for one round."""

    name: str
    how: str
    """How it is used, in a phrase."""

    def why_not(self) -> str | None:
        """A sentence if it cannot run here."""

    def version(self) -> str:
        """Return the version of the package that does the work."""

    def prepare(self, folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
        """Prepare for saves. Called once, before the first save."""

    def save(self, step: int) -> Handle:
        """Save below ``folder``, in ``step_folder`` unless it has an order of its own."""

    def load(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Put the newest save back into the live objects."""

    load_near: Callable[[nn.Module, Optimizer], None] | None
    """The same from memory that outlives the trainer; None if there is no such thing."""

    def settle(self) -> None:
        """There will be no further save: let go of memory, so that loads are from the disk."""

    def close(self) -> None:
        """Release everything."""


class Base:
    """The common part of most rivals."""

    name = ""
    how = ""
    package = "torch"
    load_near: Callable[[nn.Module, Optimizer], None] | None = None

    def __init__(self) -> None:
        self.folder = Path()
        self.newest = Path()

    def why_not(self) -> str | None:
        try:
            version(self.package)
        except PackageNotFoundError:
            return f"{self.package} is not installed"
        return None

    def version(self) -> str:
        return f"{self.package} {version(self.package)}"

    def prepare(self, folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
        self.folder, self.model, self.optimizer = folder, model, optimizer

    def step_folder(self, step: int) -> Path:
        """Return the step's folder, which is not created here."""
        self.newest = self.folder / f"step-{step:06d}"
        return self.newest

    def state(self) -> dict[str, object]:
        """Return both state dicts."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def settle(self) -> None:
        return None

    def close(self) -> None:
        return None


def flat_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Return every tensor by name, each storage once. They are the live ones, so that a load can write into them."""
    tensors = dict(model.named_parameters())  # leaves out tied ones
    tensors.update(model.named_buffers())
    for number, state in enumerate(optimizer.state.values()):
        tensors.update(
            {f"optimizer.{number}.{key}": value for key, value in state.items() if isinstance(value, Tensor)}
        )
    return {name: value.detach() for name, value in tensors.items()}


def fsync_tree(path: Path) -> None:
    """fsync every file and directory below ``path``, and the directory it is in."""
    for folder, _, files in os.walk(path):
        for name in [*files, "."]:
            fsync(Path(folder) / name)
    fsync(path.parent)


def fsync(path: Path) -> None:
    """One file or directory."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def one_process_group() -> None:
    """A gloo world of one, without a port."""
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
