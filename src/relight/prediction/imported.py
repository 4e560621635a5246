"""Histories of nodes that other tools have measured: cut into pieces of hours, read one after the other, with failures from incidents.

A piece ends at a failure, or six hours before the piece after it begins to count. So the windows before a failure are
in one piece with it. Of a long history some pieces are read: all that end at a failure, and others of healthy nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import blake3
import numpy as np

from relight.errors import ConfigError
from relight.prediction.history import GAP_S, RecordedRun, part_of, runs_of
from relight.prediction.trace import Happened, SampleTrace
from relight.units import duration_text

Array = np.ndarray[Any, Any]
PIECE_S = 6 * 3600.0
PIECES_MAX = 400
"""Most pieces that are read. Each takes 2.5 MB in training."""
ROOM = "room0"
ACCELERATORS_MAX = 64
STEP_MAX_S = 60.0
"""Longest time between samples: features are over 30 s and 300 s."""
_LEAST_S = 600.0


class Piece(NamedTuple):
    """A part of a node's history."""

    begin: float
    end: float
    failure: Happened | None
    """The failure at its end."""
    run_begin: float
    """Begin of the run that it is part of: the end of the failure before it."""


class PieceTable:
    """Values of one node on a grid of times. The last time is the end of the piece."""

    def __init__(self, piece: Piece, step_s: float) -> None:
        if not 0 < step_s <= STEP_MAX_S:
            raise ConfigError(
                f"the time between samples is above 0 and at most {duration_text(STEP_MAX_S)}", where="--step"
            )
        rows = int((piece.end - piece.begin) / step_s) + 1
        self.times = piece.end - step_s * np.arange(rows - 1, -1, -1)
        self._step_s = step_s
        self._columns: dict[str, Array] = {}

    def put(self, column: str, times: Array, values: Array) -> None:
        """Set the column's values at the nearest times of the grid. A known value stays: the first series counts."""
        rows = np.rint((times - self.times[0]) / self._step_s)
        kept = (rows >= 0) & (rows < len(self.times)) & np.isfinite(values)
        indexes = rows[kept].astype(np.int64)
        known = self._columns.setdefault(column, np.full(len(self.times), np.nan, np.float32))
        known[indexes] = np.where(np.isnan(known[indexes]), values[kept], known[indexes])

    def put_rate(self, column: str, times: Array, totals: Array, factor: float = 1.0) -> None:
        """Set the column to the growth of a total in a second. A total that fell has restarted from 0."""
        if len(times) > 1:
            grown = np.diff(totals)
            seconds = np.diff(times)
            is_near = (seconds > 0) & (seconds <= GAP_S)
            rates = np.where(grown >= 0, grown, totals[1:])[is_near] / seconds[is_near]
            self.put(column, times[1:][is_near], factor * rates)

    def divide(self, column: str, by: str) -> None:
        """Divide a column by another one, which is then removed."""
        divisor = self._columns.pop(by, None)
        if divisor is not None and column in self._columns:
            with np.errstate(divide="ignore", invalid="ignore"):
                self._columns[column] = self._columns[column] / divisor
        elif column in self._columns:
            del self._columns[column]

    def trace(self, failure: Happened | None) -> SampleTrace:
        """Return the rows with at least one value, as a recording."""
        values = np.stack(list(self._columns.values()), axis=1) if self._columns else np.empty((len(self.times), 0))
        kept = np.isfinite(values).any(axis=1)
        happened = () if failure is None else (failure,)
        return SampleTrace(tuple(self._columns), self.times[kept], values[kept], happened)


class NodeHistory(Protocol):
    """A source of histories."""

    def nodes(self) -> Mapping[str, tuple[float, float]]:
        """Return begin and end of each node's history, in seconds since 1970."""
        ...

    def read(self, node: str, piece: Piece) -> PieceTable:
        """Return the values of a piece."""
        ...


def imported(
    source: NodeHistory, failures: Mapping[str, Sequence[Happened]], report: Callable[[str], None]
) -> Iterator[tuple[str, RecordedRun]]:
    """Yield the runs of a source's nodes, and the set of each. ``failures``: those of each node, by ``short_name``.

    All pieces of a run are in one set. Raise ``ConfigError`` if the source has no node, or too little of each.
    """
    spans = source.nodes()
    every = [
        (node, piece)
        for node, (begin, end) in spans.items()
        for piece in pieces_of(begin, end, failures.get(short_name(node), ()))
    ]
    chosen = chosen_pieces(every)
    failed = sum(piece.failure is not None for _, piece in every)
    report(
        f"{len(spans)} nodes, {len(chosen)} of {len(every)} pieces of up to six hours, {failed} of them end at a failure"
    )
    count = 0
    for number, (node, piece) in enumerate(chosen):
        if number and number % 50 == 0:
            report(f"{number} of {len(chosen)} pieces")
        name = f"{node}@{int(piece.run_begin)}"
        for run in runs_of(source.read(node, piece).trace(piece.failure), f"{name}+{int(piece.begin)}"):
            count += 1
            yield part_of(name), run
    if not count:
        raise ConfigError(
            "there is no history of ten minutes without a gap", hint="a longer time range, or another --step"
        )


def pieces_of(begin: float, end: float, failures: Sequence[Happened]) -> Iterator[Piece]:
    """Cut a node's history at its failures, and each run into pieces of six hours, backwards from its end."""
    inside = sorted((failure for failure in failures if begin < failure.at <= end), key=lambda failure: failure.at)
    for failure in [*inside, None]:
        stop = end if failure is None else failure.at
        edge = stop
        while edge - begin >= _LEAST_S:
            low = max(begin, edge - PIECE_S)
            counts = failure if edge == stop and failure is not None and failure.kind else None
            yield Piece(low, edge, counts, begin)
            edge = low
        begin = stop


def chosen_pieces(pieces: Iterable[tuple[str, Piece]]) -> list[tuple[str, Piece]]:
    """Return at most ``PIECES_MAX`` pieces: those that end at a failure first, the others in pseudorandom order."""

    def order(entry: tuple[str, Piece]) -> tuple[bool, bytes]:
        node, piece = entry
        return piece.failure is None, blake3.blake3(f"{node} {piece.begin:.0f}".encode()).digest()

    return sorted(pieces, key=order)[:PIECES_MAX]


def short_name(host: str) -> str:
    """Return a host's name without its port and domain, in small letters. An address keeps its dots."""
    name = host.strip().lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    name = name.rpartition(":")[0] if name.count(":") == 1 else name
    return name if name.replace(".", "").isdecimal() or ":" in name else name.partition(".")[0]


def finite(text: str) -> float:
    """Return a number; NaN if the text is none."""
    try:
        value = float(text)
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan
