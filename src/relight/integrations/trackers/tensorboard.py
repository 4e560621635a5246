"""TensorBoard: points of steps that a resume repeats are purged, as TensorBoard's restarts do. Tested with 2.21."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from relight.integrations.frameworks import needed
from relight.integrations.trackers.rows import CheckpointLink, StepRow
from relight.integrations.trackers.tracker import Tracker

_OWN = "relight"
"""Subdirectory of Relight's own numbers: they follow the saves, and the steps' restarts must not purge them."""
_PREFIX, _DIGITS = "events.out.tfevents.", 10


class TensorBoard(Tracker):
    """Writes event files below ``log_dir``, and Relight's own numbers below ``log_dir/relight``.

    ``options``: ``torch.utils.tensorboard.SummaryWriter``'s. TensorBoard shows the values of the last time that a step
    was run. A job with ``fresh=True`` writes to a directory of its own below ``log_dir``.
    """

    name = "tensorboard"

    def __init__(self, log_dir: str | os.PathLike[str], **options: Any) -> None:
        self._make = needed("torch.utils.tensorboard", "tensorboard").SummaryWriter
        self._log_dir, self._options = os.fspath(log_dir), options
        self._writer: Any = None
        self._own_writer: Any = None
        super().__init__()

    @property
    def writer(self) -> Any:
        """The ``SummaryWriter``, for images and histograms; None until the first row was written."""
        return self._writer

    def open(self, run: str, key: str, first: int) -> tuple[str, str]:
        """See ``Tracker``."""
        where = run or (os.path.join(self._log_dir, key) if self._nonce else self._log_dir)
        if run and not os.path.isdir(run) and "://" not in run:
            where = self._log_dir  # the directory was moved
        saved = self.restored_step
        self._writer = self._begin(where, first)
        self._own_writer = self._begin(os.path.join(where, _OWN), 0 if saved is None else saved + 1)
        return where, where if "://" in where else Path(where).absolute().as_uri()

    def write(self, rows: Sequence[StepRow]) -> None:
        """See ``Tracker``."""
        for row in rows:
            for name, value in row.values.items():
                self._writer.add_scalar(name, value, row.step, row.time_s)
            for note in row.notes:
                for name, value in note.values.items():
                    self._own_writer.add_scalar(name, value, note.step, row.time_s)
        self._writer.flush()
        self._own_writer.flush()

    def link(self, checkpoint: CheckpointLink) -> None:
        """See ``Tracker``."""
        text = f"`{checkpoint.uri}` BLAKE3 `{checkpoint.digest}`"
        self._own_writer.add_text("relight/checkpoint", text, checkpoint.step)
        self._own_writer.flush()

    def finish(self) -> None:
        """See ``Tracker``."""
        self._writer.close()
        self._own_writer.close()

    def _begin(self, where: str, purge_step: int) -> Any:
        """Return a writer to a new file with the last name in the directory: TensorBoard reads the files by name."""
        before = _event_files(where)
        # the first file needs its start, too: TensorBoard takes only the second one for a restart
        writer = self._make(where, purge_step=purge_step, **self._options)
        newest = max((int(name[len(_PREFIX) :][:_DIGITS]) for name in before), default=-1)
        for name in _event_files(where) - before:
            if int(name[len(_PREFIX) :][:_DIGITS]) <= newest:  # another host's clock, or the same second
                rest = name[len(_PREFIX) + _DIGITS :]
                os.rename(os.path.join(where, name), os.path.join(where, f"{_PREFIX}{newest + 1:010d}{rest}"))
        return writer


def _event_files(where: str) -> set[str]:
    """Return the names of the event files in a local directory."""
    names = os.listdir(where) if os.path.isdir(where) else []
    return {name for name in names if name.startswith(_PREFIX) and name[len(_PREFIX) :][:_DIGITS].isdecimal()}
