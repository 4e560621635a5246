"""Open a run for reading and tagging."""

from __future__ import annotations

from relight.catalog.branches import check_free, set_tag
from relight.errors import StoreUnavailable, UnsafeContent
from relight.format.names import check_run_name, is_run_name
from relight.log import Checkpoint, History, Log, LogView, fold
from relight.log.checkpoint_list import known_checkpoints
from relight.log.identity import ENTRIES_MAX, checkpoint_dirs
from relight.log.truncated import refuse_truncated
from relight.observe.object_view import Facts, ObjectView
from relight.reader.opened import Opened, open_checkpoint
from relight.run_names import run_name
from relight.store import ByteStore
from relight.store.anchored import anchored_runs


class Run(ObjectView):
    """One run of a store. Each call reads the log's newest records."""

    def __init__(self, store: ByteStore, name: str) -> None:
        self.store = store
        self.name = check_run_name(name)
        """Name of its directory; for most runs equal to the run's name."""
        self._log = Log(store, self.name)
        self._read: list[Checkpoint] | None = None
        """The checkpoints, as ``history`` has read them last."""

    def view(self) -> LogView:
        """Return the present log."""
        return self._log.read()

    def require_whole_log(self) -> LogView:
        """Return the present log. Raise ``CorruptCheckpoint`` if its newest records were lost: the latest checkpoint is then unknown.

        Cost: one listing of the run's directory more than ``view``.
        """
        view = self.view()
        refuse_truncated(self.store, self._log, view)
        return view

    def history(self) -> History:
        """Return the run's present history."""
        history = fold(self.view())
        self._read = history.live
        return history

    def _facts(self) -> Facts:
        return Facts(run_name(self.name), [("store", self.store.url), *known_checkpoints(self._read)])

    def open(self, checkpoint: Checkpoint) -> Opened:
        """Open ``checkpoint``: its root and parts, verified."""
        view = self.view()
        return open_checkpoint(self.store, self.name, checkpoint, store_id=view.store_id, run_id=view.run_id)

    def tag(self, name: str, checkpoint_id: str | None, *, by: str = "", why: str = "") -> None:
        """Point tag ``name`` at a checkpoint, or remove it with None. ``by`` and ``why``: recorded author and reason. Cost: one record."""
        set_tag(self._log, check_free(name), checkpoint_id, by, why)


def open_run(store: ByteStore, name: str) -> Run:
    """Return the run ``name``. Raise ``CheckpointNotFound`` if the store has no such run."""
    run = Run(store, name)
    run.view()
    return run


def list_runs(store: ByteStore) -> list[str]:
    """Return the directories of the store's runs, sorted: those that hold a log, or checkpoint directories without a log.

    A run that the store's anchor remembers is listed even if nothing of it is left: opening it reports that it was rolled back.
    """
    runs = []
    for entry in store.list(""):
        if entry.is_dir and is_run_name(entry.name) and _has_log(store, entry.name):
            runs.append(entry.name)
    return sorted([*runs, *anchored_runs(store, exclude=runs)])


def _has_log(store: ByteStore, run: str) -> bool:
    try:
        return any(True for _ in store.list(f"{run}/log")) or bool(checkpoint_dirs(store, run, ENTRIES_MAX))
    # a log that is not a directory must not hide the other runs: opening this run reports the error
    except UnsafeContent:
        return True
    except StoreUnavailable as error:
        if error.retryable:
            raise
        return False  # another user's private directory next to the runs
