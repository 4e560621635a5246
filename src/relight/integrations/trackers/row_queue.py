"""Rows between the script and the tracker: what the checkpoint must hold, because the tracker has not confirmed it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from relight.errors import ConfigError
from relight.integrations.trackers.rows import RelightNumbers, StepRow, encode_row, join_rows

WAITING_BYTES_MAX = 4 << 20
"""Most bytes of rows that wait for the tracker. They are part of each checkpoint."""


class WaitingRow(NamedTuple):
    """A row that the tracker has not confirmed."""

    row: StepRow
    encoded: bytes
    is_old: bool
    """Whether it comes from a checkpoint."""


class RowQueue:
    """The rows of one life of a tracker: from its start, or from a restore, to the next restore. The tracker has the lock."""

    def __init__(self, step: int = -1, rows: Sequence[StepRow] = (), first: int = 0) -> None:
        """``rows``: those of a checkpoint. ``first``: the tracker has all rows before this step."""
        self.step, self.first = step, first
        self.notes: list[RelightNumbers] = []
        """Relight's numbers that no row has yet."""
        self.dropped = self.failures = 0
        self._waiting: deque[WaitingRow] = deque()
        self._written = self._bytes = 0
        for row in rows[:-1]:
            self._append(row, is_old=True)
        self._row = rows[-1] if rows else None  # more values of this step may follow
        self._row_is_old = self._row is not None

    def add(self, step: int, numbers: Mapping[str, float]) -> None:
        """Add numbers to the row of ``step``. Raise ``ConfigError`` if that step is over."""
        if step < self.step:
            raise ConfigError(
                f"step {step} is logged after step {self.step}", where="log()", hint="log the steps in their order"
            )
        if self._row is None or step > self._row.step:
            self.finish_row()
            self._row, self.step = StepRow.at(step), step
        self._row.values.update(numbers)

    def finish_row(self) -> None:
        """End the current row. It gets what Relight has reported since the row before."""
        if self._row is not None:
            self._row.notes.extend(self.notes)
            self.notes.clear()
            self._append(self._row, is_old=self._row_is_old)
        self._row, self._row_is_old = None, False

    def encoded(self) -> bytes:
        """Return all rows that the tracker has not confirmed. Costs about 0.1 µs for each."""
        current = [] if self._row is None else [encode_row(self._row._replace(notes=[*self._row.notes, *self.notes]))]
        return join_rows([*(waiting.encoded for waiting in self._waiting), *current])

    def unwritten(self) -> list[WaitingRow]:
        """Return the finished rows that are not written yet."""
        return list(self._waiting)[self._written :]

    def mark_written(self, rows: Sequence[WaitingRow]) -> None:
        """Mark rows of ``unwritten`` as written. Some of them may have been dropped meanwhile."""
        written = set(map(id, rows))
        self._written += sum(id(row) in written for row in islice(self._waiting, self._written, None))

    @property
    def written_step(self) -> int:
        """The step of the newest row that is written and not confirmed; −1: there is none."""
        return self._waiting[self._written - 1].row.step if self._written else -1

    def confirm(self, step: int) -> None:
        """Forget the written rows up to ``step``."""
        while self._written and self._waiting[0].row.step <= step:
            self._bytes -= len(self._waiting.popleft().encoded)
            self._written -= 1

    def _append(self, row: StepRow, *, is_old: bool) -> None:
        encoded = encode_row(row)
        self._waiting.append(WaitingRow(row, encoded, is_old))
        self._bytes += len(encoded)
        while self._bytes > WAITING_BYTES_MAX and len(self._waiting) > 1:
            self._bytes -= len(self._waiting.popleft().encoded)
            self.dropped += not self._written
            self._written = max(0, self._written - 1)
