"""A run, opened for reading and for tagging."""

from __future__ import annotations

from relight.catalog.branches import check_free, set_tag
from relight.catalog.opened import Opened, open_checkpoint
from relight.errors import StoreUnavailable, UnsafeContent
from relight.format.names import check_run_name, is_run_name
from relight.log import Checkpoint, History, Log, LogView, fold
from relight.log.identity import ENTRIES_MAX, checkpoint_dirs
from relight.log.truncated import refuse_truncated
from relight.store import ByteStore
from relight.store.anchored import anchored_runs


class Run:
    """One run of a store. Reads the log afresh each time it is asked."""

    def __init__(self, store: ByteStore, name: str) -> None:
        self.store = store
        self.name = check_run_name(name)
        """Its directory, which of most names is the name."""
        self._log = Log(store, self.name)

    def view(self) -> LogView:
        """The log as it is now."""
        return self._log.read()

    def require_whole_log(self) -> LogView:
        """Return the log as it is now. ``CorruptCheckpoint`` if its newest records were lost: what is the latest is then not known.

        Cost: one listing of the run's directory more than ``view``.
        """
        view = self.view()
        refuse_truncated(self.store, self._log, view)
        return view

    def history(self) -> History:
        """The run as it is now."""
        return fold(self.view())

    def open(self, checkpoint: Checkpoint) -> Opened:
        """Root and parts of ``checkpoint``, checked."""
        view = self.view()
        return open_checkpoint(self.store, self.name, checkpoint, store_id=view.store_id, run_id=view.run_id)

    def tag(self, name: str, checkpoint_id: str | None, *, by: str = "", why: str = "") -> None:
        """Point tag ``name`` at a checkpoint, or take it away with None; ``by`` whom, and ``why``, if that is to be known. One record."""
        set_tag(self._log, check_free(name), checkpoint_id, by, why)


def open_run(store: ByteStore, name: str) -> Run:
    """The run ``name``; ``CheckpointNotFound`` if the store has none of that name."""
    run = Run(store, name)
    run.view()
    return run


def list_runs(store: ByteStore) -> list[str]:
    """Return the directories of the store's runs, sorted: those that hold a log, or checkpoint directories whose log is missing.

    A run that the store's anchor remembers is listed even if nothing of it is left: opening it reports that it was rolled back.
    """
    found = []
    for entry in store.list(""):
        if entry.is_dir and is_run_name(entry.name) and _has_log(store, entry.name):
            found.append(entry.name)
    return sorted([*found, *anchored_runs(store, besides=found)])


def _has_log(store: ByteStore, run: str) -> bool:
    try:
        return any(True for _ in store.list(f"{run}/log")) or bool(checkpoint_dirs(store, run, ENTRIES_MAX))
    except UnsafeContent:  # one run whose log is no directory must not hide the others: opening it says what is wrong
        return True
    except StoreUnavailable as error:
        if error.retryable:
            raise
        return False  # somebody's private directory beside the runs
