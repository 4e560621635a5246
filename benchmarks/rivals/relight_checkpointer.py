"""Relight itself. It leaves out no fsync, so none is added; every byte is verified by its loads."""

from __future__ import annotations

import inspect
import time
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

import relight
from benchmarks.rivals.base import Base, Handle
from relight.observe import Event, subscribe


def background_is_there() -> bool:
    """Return whether this Relight has an engine that writes while training continues."""
    return "background" in inspect.signature(relight.Checkpointer).parameters


class RelightSync(Base):
    """Saves at once."""

    name = "Relight"
    how = "Checkpointer(background=False).save(block=True), two kept; restore by a new Checkpointer, from the disk"
    package = "relight"
    background = False

    def _open(self, model: nn.Module, optimizer: Optimizer, *, background: bool) -> Any:
        options: dict[str, Any] = {"background": background} if background_is_there() else {}
        return relight.Checkpointer(
            self.folder / "store" / "bench",
            model=model,
            optimizer=optimizer,
            keep=relight.keep(last=2),
            signals=False,
            **options,
        )

    def prepare(self, folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
        super().prepare(folder, model, optimizer)
        self.checkpointer = self._open(model, optimizer, background=self.background)

    def save(self, step: int) -> Handle:
        # before retention: what is removed after it, and read back for that, counts as lost time
        durable: list[float] = []
        undo = subscribe(lambda event: durable.append(time.perf_counter()) if event.name == "save.durable" else None)
        save = self.checkpointer.save(step, block=not self.background)

        def wait() -> None:
            save.wait(until="durable")
            deadline = time.monotonic() + 5
            while (
                not durable and time.monotonic() < deadline
            ):  # another thread emits the event just after wait() returns
                time.sleep(0.0005)
            undo()

        return Handle(finish=wait, known=lambda: durable[-1])

    def load(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._restore(model, optimizer, "store")

    def _restore(self, model: nn.Module, optimizer: Optimizer, source: str) -> None:
        """Restore as a restarted script does. Raise an error if the bytes are from another source."""
        events: list[Event] = []
        undo = subscribe(events.append)
        again = self._open(model, optimizer, background=False)
        again.restore()
        undo()
        again.close(save=False)
        sources = [event.fields.get("source", "store") for event in events if event.name == "restore.done"]
        if sources != [source]:
            raise RuntimeError(f"restored from {sources}, not from {source}: this load would be counted as another")

    def settle(self) -> None:
        self.checkpointer.close(save=False)


class RelightBackground(RelightSync):
    """Background saves: copies during the next step, written by an agent."""

    name = "Relight background"
    how = "Checkpointer(background=True).save(block=False), two kept; restore by a new Checkpointer, from memory and from the disk"
    background = True

    def why_not(self) -> str | None:
        return None if background_is_there() else "this Relight has no background engine yet"

    def load_near(self, model: nn.Module, optimizer: Optimizer) -> None:  # type: ignore[override]
        self._restore(model, optimizer, "memory")
