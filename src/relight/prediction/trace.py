"""Recording of a node's samples over hours: a ring buffer that is written each second, and the file that it becomes."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from relight.errors import CorruptCheckpoint
from relight.observe.own_files import OwnFiles
from relight.prediction.sample import NodeSample, SampleShape
from relight.prediction.sealed_file import StoredArray, read_sealed, write_sealed

ENDING = ".trace"
_INCIDENTS_MAX = 1000
HOURS = 6.0


class Happened(NamedTuple):
    """A failure in a trace."""

    at: float
    kind: str
    """Kind as in ``relight incidents``: ``memory``, ``storage``, ``hardware``, ``hang``…"""
    cause: str = ""
    """What led to it, if known: only the simulator knows it."""


@dataclass(frozen=True)
class SampleTrace:
    """A recording: a row of float32 for each time."""

    columns: tuple[str, ...]
    at: np.ndarray[Any, Any]
    values: np.ndarray[Any, Any]
    happened: tuple[Happened, ...] = ()
    metadata: dict[str, str] = field(default_factory=dict)
    """Metadata, such as ``name`` and ``host``."""

    def write(self, path: Path) -> None:
        """Write the recording to a file, atomically and durably."""
        times, values = StoredArray.of(self.at.astype("<f8")), StoredArray.of(self.values.astype("<f4"))
        write_sealed(path, _TraceFile(self.columns, self.happened, self.metadata, times, values))


class _TraceFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A recording's file."""

    columns: tuple[str, ...]
    happened: tuple[Happened, ...]
    metadata: dict[str, str]
    times: StoredArray
    values: StoredArray
    relight: Literal["recording"] = "recording"
    version: Literal[1] = 1


def read_trace(path: Path) -> SampleTrace:
    """Read a recording. Raise ``CorruptCheckpoint`` if the file is not an intact recording."""
    stored = read_sealed(path, _TraceFile, "recording")
    columns, happened = stored.columns, stored.happened[:_INCIDENTS_MAX]
    try:
        times, values = stored.times.array(), stored.values.array()
    except ValueError as error:
        raise CorruptCheckpoint(f"a recording with an invalid array: {error}"[:200], where=str(path)) from None
    fits = times.ndim == 1 and values.shape == (len(times), len(columns)) and len(set(columns)) == len(columns)
    ordered = fits and np.isfinite(times).all() and not (np.diff(times) <= 0).any()
    if not ordered:
        raise CorruptCheckpoint("the recording's rows do not match its head", where=str(path))
    return SampleTrace(columns, times, values, happened, stored.metadata)


def traces_in(directory: Path) -> list[Path]:
    """Return the recordings in a directory and below it."""
    return sorted(directory.rglob(f"*{ENDING}"))


class SampleRecorder:
    """Recorder of the last hours. Memory: four bytes a value, 9 MB for 6 hours of 8 ranks and 8 accelerators."""

    def __init__(self, shape: SampleShape, hours: float = HOURS) -> None:
        """Allocate all memory."""
        self.shape = shape
        self._columns = shape.columns
        self._rows = max(1, int(hours * 3600))
        self._at = np.zeros(self._rows, np.float64)
        self._values = np.full((self._rows, len(self._columns)), np.nan, np.float32)
        self._count = 0
        self._happened: list[Happened] = []

    @property
    def nbytes(self) -> int:
        """Return the bytes of memory."""
        return self._at.nbytes + self._values.nbytes

    def add(self, sample: NodeSample) -> np.ndarray[Any, Any]:
        """Record a sample.

        Return its row, valid until the ring overwrites it. A sample that is not later replaces the last one.
        """
        if self._count and sample.at <= self._at[(self._count - 1) % self._rows]:
            self._count -= 1
            sample = sample._replace(at=float(self._at[self._count % self._rows]))
        place = self._count % self._rows
        self._at[place] = sample.at
        self._values[place] = self.shape.row(sample)
        self._count += 1
        row: np.ndarray[Any, Any] = self._values[place]
        return row

    def clear(self) -> None:
        """Begin a new recording."""
        self._count, self._happened = 0, []

    def note(self, happened: Happened) -> None:
        """Record a failure. Its time is on the rows' clock."""
        self._happened = [*self._happened, happened][-_INCIDENTS_MAX:]

    def trace(self, **metadata: str) -> SampleTrace:
        """Return a copy of the recording, oldest row first. ``metadata``: such as the host."""
        rows = np.arange(max(0, self._count - self._rows), self._count) % self._rows
        times = self._at[rows]
        happened = tuple(failure for failure in self._happened if len(times) and times[0] <= failure.at)
        return SampleTrace(self._columns, times, self._values[rows], happened, metadata)


def name_of(time_s: float) -> str:
    """Return the file name of a recording of that time."""
    return f"{int(time_s):012d}{ENDING}"


def keep_newest(directory: Path, count: int) -> None:
    """Delete the oldest recordings that are named by their time, beyond ``count``.

    Files with other names are not Relight's: they stay.
    """
    with suppress(OSError), OwnFiles(directory, rf"\d{{12}}{re.escape(ENDING)}") as files:
        file_names = sorted(file.name for file in files)
        for name in file_names[: max(0, len(file_names) - count)]:
            files.remove(name)
