"""Observers of the training loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from relight.checkpointer.checkpointer import Checkpointer


class Observer(Protocol):
    """Observer of the training loop, such as ``relight prove``. Its methods are called in the training thread."""

    def place(self, url: str, run: str) -> tuple[str, str]:
        """Return the store and run where a Checkpointer that was given ``url`` and ``run`` must save instead."""

    def on_start(self, ckpt: Checkpointer) -> None:
        """Called when a Checkpointer was made."""

    def on_restore(self, ckpt: Checkpointer, step: int, checkpoint_id: str | None) -> None:
        """Called after a restore from ``checkpoint_id`` (None for a fresh run); ``step`` is the first step still to
        run."""

    def on_step(self, ckpt: Checkpointer, step: int, metrics: Mapping[str, Any], samples: Any) -> None:
        """Called when ``step`` ended, before Relight decides whether to save."""

    def on_end(self, ckpt: Checkpointer) -> None:
        """Called when the Checkpointer was closed."""


observers: list[Observer] = []
"""Observers that every Checkpointer of this process notifies."""
