"""Hooks: side features of a Checkpointer, each in its own file, called at fixed points of a run."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

from relight.agent import SaveResult
from relight.checkpointer.observer import observers
from relight.checkpointer.save_handle import Save
from relight.commit import Attempt, SaveReport
from relight.log import History
from relight.restore.result import Resumed


class CommittedSave(NamedTuple):
    """A save that became a checkpoint."""

    save: Save
    report: SaveReport | SaveResult
    metrics: Mapping[str, float]
    timings: Mapping[str, float]
    """Seconds by phase; ``blocked``: of the training thread."""
    before: int | None
    """Step of the save before it."""
    waits: bool
    """Whether another save is in progress."""
    made_here: bool = False
    """Whether this process wrote it. Otherwise the agent did, which also tags, applies retention and copies to further tiers."""
    tag: str | None = None
    """Its tag, which is not set yet. Only of a save that this process wrote."""


class Hook:
    """A side feature. Override the methods that it needs; those here do nothing.

    All are called in the training thread, in the order of ``hooks_of``, and ``on_close`` in the reverse order. An exception ends the
    user's call: catch and report errors (``relight.observe.emit``) that must not stop training.
    """

    def on_restore(self, resumed: Resumed, start: int, checkpoint_id: str | None) -> None:
        """Called after a restore. ``start``: first step still to run. ``checkpoint_id``: the next save's parent; None: a new history."""

    def on_attempt(self, attempt: Attempt, history: History) -> None:
        """Called once this process has charge of the run, before its first save. ``history``: the run's log until then."""

    def on_step(self, step: int, metrics: Mapping[str, Any], samples: Any) -> None:
        """Called when ``step`` ended, before the decision whether to save."""

    def on_request(self, save: Save) -> None:
        """Called when the handle of a save was made, and nothing was copied."""

    def on_start(self, save: Save, metrics: Mapping[str, float]) -> None:
        """Called when a save was started. It may fail later."""

    def on_durable(self, done: CommittedSave) -> None:
        """Called for each checkpoint. For a save of the agent: at the next call of the Checkpointer after its COMMIT."""

    def on_failure(self, save: Save) -> None:
        """Called when a save failed for good; ``save.error`` says why."""

    def on_close(self, polite: bool) -> None:
        """Release all resources. ``polite``: no other process restores from this node's memory."""


class ObserverHook(Hook):
    """Forwards to the observers of this process, such as ``relight drill --prove`` and the heartbeat."""

    def __init__(self, owner: object) -> None:
        self._ref = weakref.ref(owner)
        for observer in observers:
            observer.on_start(owner)

    def on_restore(self, resumed: Resumed, start: int, checkpoint_id: str | None) -> None:
        """See ``Hook``."""
        for observer in observers:
            observer.on_restore(self._owner, start, checkpoint_id)

    def on_step(self, step: int, metrics: Mapping[str, Any], samples: Any) -> None:
        """See ``Hook``."""
        for observer in observers:
            observer.on_step(self._owner, step, metrics, samples)

    def on_close(self, polite: bool) -> None:
        """See ``Hook``."""
        for observer in observers:
            observer.on_end(self._owner)

    @property
    def _owner(self) -> object:
        owner = self._ref()
        assert owner is not None, "its owner calls it"
        return owner
