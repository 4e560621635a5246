"""Statistics and histograms of a checkpoint's tensors, and the pieces in which a tensor is stored."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from relight.format import Tensor
from relight.layout import Sink
from relight.reader.chunk_reader import Progress, read_tensors
from relight.reader.opened import Opened
from relight.reader.stats import StatsSink, stats, values_of

CLASSES = 48
Pieces = Sequence[tuple[int, Tensor]]
"""All pieces of one tensor: ``(rank, entry in that rank's part)``."""


def pieces_named(opened: Opened, wanted: Callable[[str], bool]) -> dict[str, Pieces]:
    """Return the tensors with wanted names, in the order of the first rank that has them."""
    by_name: dict[str, list[tuple[int, Tensor]]] = {}
    for part in opened.parts:
        for tensor in part.tensors:
            if wanted(tensor.name):
                by_name.setdefault(tensor.name, []).append((part.rank, tensor))
    rows: dict[str, Pieces] = {}
    for name, pieces in by_name.items():
        # an empty piece only means that another part has the bytes; one copy of a scalar is enough
        with_bytes = [(rank, piece) for rank, piece in pieces if piece.length]
        rows[name] = (with_bytes or pieces)[: None if pieces[0][1].shape else 1]
    return rows


def numbers_of(opened: Opened, rows: Iterable[Pieces], progress: Progress | None = None) -> list[dict[str, Any]]:
    """Return the ``stats`` of each tensor. Every chunk with any of its bytes is read once and verified. Only the numbers are kept."""
    rows = list(rows)
    sinks = {
        (rank, piece.full_name): StatsSink(piece.dtype, piece.length)
        for row in rows
        for rank, piece in row
        if piece.length
    }
    _read(opened, sinks, progress)
    return [stats(sinks[rank, piece.full_name] for rank, piece in row if piece.length) for row in rows]


def spread_of(
    opened: Opened, pieces: Pieces, least: float, most: float, progress: Progress | None = None
) -> tuple[list[float], list[int]]:
    """Return a histogram of the finite values, with equal classes from ``least`` to ``most``: edges (one more than counts), and counts.

    Both are empty if the range is too narrow or too wide for distinct finite edges. Cost: reads the tensor once.
    """
    import numpy as np

    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        edges = np.linspace(least, most, CLASSES + 1)
    if not np.isfinite(edges).all() or not (np.diff(edges) > 0).all():
        return [], []
    sinks = {
        (rank, piece.full_name): _Classes(piece.dtype, piece.length, least, most)
        for rank, piece in pieces
        if piece.length
    }
    _read(opened, sinks, progress)
    return [float(edge) for edge in edges], [
        sum(sink.counts[index] for sink in sinks.values()) for index in range(CLASSES)
    ]


class _Classes:
    """Sink that counts the values in each class. Memory: a small multiple of one chunk."""

    def __init__(self, dtype: str, length: int, least: float, most: float) -> None:
        self.dtype, self.length = dtype, length
        self.counts = [0] * CLASSES
        self._least, self._scale = least, CLASSES / (most - least)
        self._lock = threading.Lock()

    def view(self) -> memoryview | None:
        """Return None: there is no memory to read into."""
        return None

    def absorb(self, start: int, data: memoryview) -> None:
        """Count a run of elements."""
        import numpy as np

        values = values_of(self.dtype, data)
        if values is None or not values.size or values.dtype.kind == "c":
            return
        with np.errstate(invalid="ignore"):
            wide = values.astype("f8")
        if values.dtype.kind == "f":
            wide = wide[np.isfinite(wide)]
        places = np.clip(((wide - self._least) * self._scale).astype("i8"), 0, CLASSES - 1)
        counted = np.bincount(places, minlength=CLASSES).tolist()
        with self._lock:
            self.counts = [count + more for count, more in zip(self.counts, counted, strict=True)]


def _read(opened: Opened, sinks: Mapping[tuple[int, str], Sink], progress: Progress | None) -> None:
    for part in opened.parts:
        wanted: dict[int, Sink] = {
            index: sinks[part.rank, tensor.full_name]
            for index, tensor in enumerate(part.tensors)
            if tensor.length and (part.rank, tensor.full_name) in sinks
        }
        read_tensors(opened, part, wanted, progress=progress)
