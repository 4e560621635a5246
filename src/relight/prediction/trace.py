"""What was seen of a node over hours: a ring that is written to each second, and the file that it becomes."""

from __future__ import annotations

import math
import re
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from relight.errors import CorruptCheckpoint
from relight.observe.own_files import OwnFiles
from relight.prediction.arrays import read_arrays, write_arrays
from relight.prediction.sample import NodeSample, SampleShape

ENDING = ".trace"
_MAGIC = b"RLTRACE1"
_INCIDENTS_MAX = 1000
HOURS = 6.0


class Happened(NamedTuple):
    """A failure in a trace."""

    at: float
    kind: str
    """As ``relight incidents`` has it: ``memory``, ``storage``, ``hardware``, ``hang``…"""
    cause: str = ""
    """What led to it, where that is known: the simulator knows."""


@dataclass(frozen=True)
class SampleTrace:
    """A recording: a row of float32 for each time."""

    columns: tuple[str, ...]
    at: np.ndarray[Any, Any]
    values: np.ndarray[Any, Any]
    happened: tuple[Happened, ...] = ()
    told: dict[str, str] = field(default_factory=dict)
    """What else is known of it, such as ``name`` and ``host``."""

    def write(self, path: Path) -> None:
        """Into a file, whole and durable, or not at all."""
        told = {"columns": list(self.columns), "happened": [list(one) for one in self.happened], "told": self.told}
        write_arrays(path, _MAGIC, told, {"at": self.at.astype("<f8"), "values": self.values.astype("<f4")})


def read_trace(path: Path) -> SampleTrace:
    """``CorruptCheckpoint`` for what is no whole recording."""
    told, arrays = read_arrays(path, _MAGIC, "recording")
    try:
        columns = tuple(str(one) for one in told["columns"])
        happened = tuple(Happened(float(at), str(kind), str(cause)) for at, kind, cause in told["happened"][:_INCIDENTS_MAX])
        notes = {str(name): str(text) for name, text in told["told"].items()}
        at, values = arrays["at"], arrays["values"]
    except (KeyError, TypeError, ValueError, AttributeError):
        raise CorruptCheckpoint("a recording without its columns", where=str(path)) from None
    whole = at.ndim == 1 and values.shape == (len(at), len(columns)) and len(set(columns)) == len(columns)
    if not whole or not np.isfinite(at).all() or (np.diff(at) <= 0).any() or not all(math.isfinite(one.at) for one in happened):
        raise CorruptCheckpoint("a recording whose rows are not what its head says", where=str(path))
    return SampleTrace(columns, at, values, happened, notes)


def traces_in(directory: Path) -> list[Path]:
    """Recordings there, and below."""
    return sorted(directory.rglob(f"*{ENDING}"))


class SampleRecorder:
    """The last hours, in bounded memory: four bytes a value, 9 MB for 6 hours of 8 ranks and 8 accelerators."""

    def __init__(self, shape: SampleShape, hours: float = HOURS) -> None:
        """Memory is taken here, once."""
        self.shape = shape
        self._columns = shape.columns
        self._rows = max(1, int(hours * 3600))
        self._at = np.zeros(self._rows, np.float64)
        self._values = np.full((self._rows, len(self._columns)), np.nan, np.float32)
        self._count = 0
        self._happened: list[Happened] = []

    @property
    def nbytes(self) -> int:
        """Of memory."""
        return self._at.nbytes + self._values.nbytes

    def add(self, sample: NodeSample) -> np.ndarray[Any, Any]:
        """The sample's row, which stands until the ring comes round. One that is not later than the last takes its place."""
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
        """Begin a new one."""
        self._count, self._happened = 0, []

    def note(self, happened: Happened) -> None:
        """A failure, in time with the rows."""
        self._happened = [*self._happened, happened][-_INCIDENTS_MAX:]

    def trace(self, **told: str) -> SampleTrace:
        """What there is, oldest first; a copy."""
        rows = np.arange(max(0, self._count - self._rows), self._count) % self._rows
        at = self._at[rows]
        happened = tuple(one for one in self._happened if len(at) and at[0] <= one.at)
        return SampleTrace(self._columns, at, self._values[rows], happened, told)


def name_of(at: float) -> str:
    """What a recording of that time is called."""
    return f"{int(at):012d}{ENDING}"


def keep_newest(directory: Path, count: int) -> None:
    """Of recordings that are called by their time only so many stay there; others are none of ours to delete."""
    with suppress(OSError), OwnFiles(directory, rf"\d{{12}}{re.escape(ENDING)}") as files:
        ours = sorted(one.name for one in files)
        for name in ours[: max(0, len(ours) - count)]:
            files.remove(name)
