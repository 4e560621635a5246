"""Observers of the training loop."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol

from relight.checkpointer.closed import Closed
from relight.checkpointer.run_progress import RunProgress


class EndingSignals(Protocol):
    """The signal handlers of a Checkpointer, for the question whether a signal ends the job."""

    @property
    def pending(self) -> str | None:
        """See ``SignalHandlers``."""

    @property
    def installed(self) -> bool:
        """See ``SignalHandlers``."""

    @property
    def ending(self) -> bool:
        """See ``SignalHandlers``."""


class ObservedCheckpointer(Protocol):
    """What the observers in this room use of a Checkpointer. Its module imports theirs."""

    _closed: Closed | None
    _progress: RunProgress

    @property
    def _signals(self) -> EndingSignals | None: ...

    @property
    def replica_mismatch(self) -> str:
        """See ``Checkpointer``."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Observer(Protocol):
    """Observer of the training loop, such as ``relight drill --prove``. Its methods are called in the training thread.

    ``ckpt`` is the ``Checkpointer``.
    """

    def place(self, url: str, run: str) -> tuple[str, str]:
        """Return the store and run where a Checkpointer that was given ``url`` and ``run`` must save instead."""

    def on_start(self, ckpt: Any) -> None:
        """Called when a Checkpointer was made."""

    def on_restore(self, ckpt: Any, step: int, checkpoint_id: str | None) -> None:
        """Called after a restore from ``checkpoint_id`` (None for a fresh run); ``step`` is the first step still to
        run."""

    def on_step(self, ckpt: Any, step: int, metrics: Mapping[str, Any], samples: Any) -> None:
        """Called when ``step`` ended, before Relight decides whether to save."""

    def on_end(self, ckpt: Any) -> None:
        """Called when the Checkpointer was closed."""


observers: list[Observer] = []
"""Observers that every Checkpointer of this process notifies."""
