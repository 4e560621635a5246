"""A log as a reader sees it at one moment: the records that count, the faults, and the summary that stands for older records."""

from __future__ import annotations

from dataclasses import dataclass, field

from relight.format import Record


@dataclass(frozen=True, slots=True)
class Fault:
    """A record that counts for nothing, and why."""

    seq: int
    file: str
    reason: str


@dataclass(frozen=True, slots=True)
class Line:
    """Ancestors of a checkpoint whose parents are not in the log's summary any more."""

    parents: tuple[str, ...]
    """Ids of its nearest ancestors that the summary has."""
    unknown: tuple[tuple[int, int], ...]
    """Record number and step of each checkpoint on the way, or of itself, whose parent is unknown; the greatest ones only."""


@dataclass(frozen=True, slots=True)
class LogSummary:
    """What records 0 to ``upto`` amount to: the records that still matter, and the folded state that they led to."""

    store: str
    run: str
    upto: int
    hash: str
    """Hash of record ``upto``, to which the next record is chained."""
    counted: int
    """Number of records up to ``upto`` that count."""
    trusted: bool
    """Whether the writer counted only records of signers that it trusts."""
    records: tuple[Record, ...] = ()
    """Records that matter, in order. ``prev`` and ``file_hash`` of these are empty."""
    faults: tuple[Fault, ...] = ()
    """The newest faults."""
    more_faults: int = 0
    """Number of faults that are older than ``faults``."""
    epoch: int = 0
    live: tuple[int, ...] = ()
    """Numbers of the COMMITs of live checkpoints, oldest first."""
    retired: tuple[tuple[int, int, int], ...] = ()
    """For each retired checkpoint that is kept: number of its COMMIT, of its RETIRE, and 1 if it may be recalled."""
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
    """What the log says now. ``head`` is the highest number there, −1 if none; ``head_hash`` what the next record chains to.

    If the reader began at a summary, ``records`` are those of the summary that still matter and all newer ones.
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
        """The last record that a summary stands for; −1 if every record was read."""
        return self.summary.upto if self.summary is not None else -1

    @property
    def counted(self) -> int:
        """Number of records that count, those that the summary stands for included."""
        if self.summary is None:
            return len(self.records)
        return len(self.records) - len(self.summary.records) + self.summary.counted

    @property
    def damaged(self) -> tuple[Fault, ...]:
        """The faults among the log's records: a stray above the head is not one of the log's records."""
        return tuple(fault for fault in self.faults if fault.seq <= self.head)

    @property
    def newer(self) -> tuple[Record, ...]:
        """The records after the summary: all of them if every record was read."""
        return self.records if self.summary is None else self.records[len(self.summary.records) :]
