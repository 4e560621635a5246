"""A run's log that is read again and again, also if the run is removed and begun again."""

from __future__ import annotations

from time import monotonic

from relight.errors import CheckpointNotFound
from relight.log import Log, LogView
from relight.store import ByteStore

COMPARE_S = 10.0
"""Seconds between two comparisons of a log without new records: another run may have got its name, and as many records."""


class FollowedLog:
    """Reads only new records. Not thread-safe."""

    def __init__(self, store: ByteStore, run: str) -> None:
        self._store, self._run = store, run
        self._begin()

    def _begin(self) -> None:
        self._log, self._head, self._compared_at = Log(self._store, self._run), -1, monotonic()
        self._faults: set[str] = set()
        """Files of damaged records that this log had when it was first read."""

    def read(self) -> LogView:
        """Return the log. Raise what ``Log.read`` raises."""
        try:
            view = self._log.read()
        except CheckpointNotFound:
            self._begin()
            raise
        faults = {fault.file for fault in view.faults}
        # records of another run appear damaged after those of the removed one
        replaced = view.head < self._head or not faults <= self._faults
        if not replaced and view.head == self._head and monotonic() - self._compared_at > COMPARE_S:
            self._compared_at = monotonic()
            replaced = not self._log.is_in_store(view)
        if replaced:
            self._begin()
            view = self._log.read()
            self._faults = {fault.file for fault in view.faults}
        self._head = view.head
        return view
