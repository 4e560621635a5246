"""Watching the loop from outside."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from relight.checkpointer.checkpointer import Checkpointer


class Observer(Protocol):
    """Somebody who watches the loop, such as ``relight prove``. Called in the training thread."""

    def place(self, url: str, run: str) -> tuple[str, str]:
        """Where a Checkpointer that was given this store and run is to save instead."""

    def on_start(self, ckpt: Checkpointer) -> None:
        """A Checkpointer was made."""

    def on_restore(self, ckpt: Checkpointer, step: int, checkpoint_id: str | None) -> None:
        """State was restored from ``checkpoint_id``, None on a fresh run; ``step`` is the first still to do."""

    def on_step(self, ckpt: Checkpointer, step: int, metrics: Mapping[str, Any], samples: Any) -> None:
        """Step ``step`` ended; nothing was decided yet."""

    def on_end(self, ckpt: Checkpointer) -> None:
        """The Checkpointer is closed."""


observers: list[Observer] = []
"""Told by every Checkpointer of this process."""
