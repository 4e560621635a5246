"""A log as read at one moment: the valid records, the faults, and the summary that replaces older records."""

from __future__ import annotations

from dataclasses import dataclass, field

from relight.format import Record


@dataclass(frozen=True, slots=True)
class Fault:
    """An invalid or missing record, and the reason."""

    seq: int
    file: str
    reason: str


@dataclass(frozen=True, slots=True)
class Line:
    """Ancestors of a checkpoint. Its parents are no longer in the log's summary."""

    parents: tuple[str, ...]
    """Ids of its nearest ancestors that the summary has."""
    unknown: tuple[tuple[int, int], ...]
    """Record number and step of itself and of each ancestor on the way, if the parent is unknown; only the greatest pairs."""


@dataclass(frozen=True, slots=True)
class LogSummary:
    """Summary of records 0 to ``upto``: the records that still matter, and the folded state after ``upto``."""

    store: str
    run: str
    upto: int
    hash: str
    """Hash of record ``upto``, to which the next record is chained."""
    counted: int
    """Number of valid records up to ``upto``."""
    trusted: bool
    """Whether the writer accepted only records of signers that it trusts."""
    records: tuple[Record, ...] = ()
    """Records that still matter, in order. Their ``prev`` and ``file_hash`` are empty."""
    faults: tuple[Fault, ...] = ()
    """The newest faults."""
    more_faults: int = 0
    """Number of faults that are older than ``faults``."""
    epoch: int = 0
    live: tuple[int, ...] = ()
    """Numbers of the COMMITs of live checkpoints, oldest first."""
    retired: tuple[tuple[int, int, int], ...] = ()
    """For each kept retired checkpoint: number of its COMMIT, number of its RETIRE, and 1 if it can be undeleted."""
    alone: tuple[int, ...] = ()
    """Numbers of the COMMITs of repacked checkpoints."""
    tags: dict[str, str] = field(default_factory=dict)
    aside: tuple[str, ...] = ()
    skips: tuple[tuple[int, int], ...] = ()
    cuts: dict[str, float] = field(default_factory=dict)
    best_by: tuple[str, str] | None = None
    lines: dict[str, Line] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LogView:
    """State of the log at one moment. ``head``: the highest record number, −1 if none. ``head_hash``: the hash the next record chains to.

    If the reader began at a summary, ``records`` are the summary's records and all newer ones.
    """

    run: str
    store_id: str
    run_id: str
    records: tuple[Record, ...]
    faults: tuple[Fault, ...]
    head: int
    head_hash: str
    summary: LogSummary | None = None

    @property
    def base(self) -> int:
        """Number of the last record that the summary replaces; −1 if every record was read."""
        return self.summary.upto if self.summary is not None else -1

    @property
    def counted(self) -> int:
        """Number of valid records, including those that the summary replaces."""
        if self.summary is None:
            return len(self.records)
        return len(self.records) - len(self.summary.records) + self.summary.counted

    @property
    def damaged(self) -> tuple[Fault, ...]:
        """Faults among the log's records. A stray above the head does not belong to the log."""
        return tuple(fault for fault in self.faults if fault.seq <= self.head)

    @property
    def newer(self) -> tuple[Record, ...]:
        """Records after the summary; all records if every record was read."""
        return self.records if self.summary is None else self.records[len(self.summary.records) :]
