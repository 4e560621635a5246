"""Write tensors to files: convert their pieces, which arrive in any order from any thread, to the target dtype."""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from relight.export.convert import converted, narrowed
from relight.export.files import OutputFile
from relight.format import DTYPES
from relight.format.crc import crc32, joined_crc


class ExportFile(Protocol):
    """A file that takes its bytes in any order."""

    def write_at(self, offset: int, data: memoryview) -> None:
        """Write all of ``data``."""

    def patch(self, offset: int, data: bytes) -> None:
        """Overwrite bytes. No other thread may be writing."""


class TensorOffset(NamedTuple):
    """Offset of a tensor in a file, offsets of its CRC32, and the fixed bytes before it: ``(offset, bytes)``."""

    file: ExportFile
    offset: int
    sums: tuple[int, ...]
    head: tuple[tuple[int, bytes], ...]


class Outgoing:
    """A tensor that is written to ``targets``. Receives runs of its elements, in any order, each once."""

    def __init__(self, dtype: str, target: str, targets: Sequence[TensorOffset]) -> None:
        self._dtype, self._target, self._targets = dtype, target, targets
        self.itemsize = DTYPES[dtype].itemsize
        self._size = DTYPES[target].itemsize
        self.sums: list[tuple[int, int, int]] = []
        """CRC32s of runs that were written, if a file wants them: first byte, length, CRC32."""
        self._wants_sums = any(place.sums for place in targets)
        self._heads = [(place.file, *piece) for place in targets for piece in place.head]
        self.overflowed = 0

    def put(self, first: int, data: memoryview) -> None:
        """Write elements from number ``first`` on."""
        self._put(first, *converted(data, self._dtype, self._target))

    def put_values(self, first: int, values: np.ndarray[Any, Any]) -> None:
        """Write elements that were computed in double precision."""
        self._put(first, *narrowed(values, self._target))

    def _put(self, first: int, out: memoryview, over: int) -> None:
        self.write_heads()
        start = first * self._size
        for place in self._targets:
            place.file.write_at(place.offset + start, out)
        if self._wants_sums:
            self.sums.append((start, len(out), crc32(out)))
        self.overflowed += (
            over  # not locked: concurrent runs of one tensor are few, and a lost update never hides all overflows
        )

    def write_heads(self) -> None:
        """Write the fixed bytes before the tensor, once: the block that has them is being filled now."""
        with contextlib.suppress(IndexError):
            while True:
                file, offset, data = self._heads.pop()  # pop is atomic: each is written by one thread
                file.write_at(offset, memoryview(data))

    def finish(self) -> None:
        """Write the CRC32s. Call it when all elements were put and every thread is done."""
        self.write_heads()
        if self._wants_sums:
            value = joined_crc(self.sums).to_bytes(4, "little")
            for place in self._targets:
                for offset in place.sums:
                    place.file.patch(offset, value)


class Straight:
    """Sink for a piece that is contiguous in the whole tensor: forwards the elements as they arrive."""

    def __init__(self, tensor: Outgoing, first: int, elements: int) -> None:
        self._tensor, self._first = tensor, first
        self.length = elements * tensor.itemsize

    def view(self) -> memoryview | None:
        """Return None: there is no memory to read into."""
        return None

    def absorb(self, start: int, data: memoryview) -> None:
        """Write a run of elements."""
        self._tensor.put(self._first + start // self._tensor.itemsize, data)


def targets_of(output_files: Sequence[OutputFile], files: Sequence[ExportFile]) -> dict[int, list[TensorOffset]]:
    """Return by entry number where its tensor is written. ``files``: the files, in the order of their layouts."""
    targets: dict[int, list[TensorOffset]] = {}
    for file, output_file in zip(files, output_files, strict=True):
        slots = sorted(output_file.slots, key=lambda slot: slot.offset)
        offsets = [slot.offset for slot in slots]
        heads: list[list[tuple[int, bytes]]] = [[] for _ in slots]
        for offset, data in output_file.fixed:
            following = bisect_right(offsets, offset)
            if following < len(slots):
                heads[following].append((offset, data))
        for slot, head in zip(slots, heads, strict=True):
            targets.setdefault(slot.entry, []).append(TensorOffset(file, slot.offset, slot.sums, tuple(head)))
    return targets


def write_trailing(output_files: Sequence[OutputFile], files: Sequence[ExportFile]) -> None:
    """Write the fixed bytes after all tensors of each file."""
    for file, output_file in zip(files, output_files, strict=True):
        last = max((slot.offset for slot in output_file.slots), default=-1)
        for offset, data in output_file.fixed:
            if offset >= last:
                file.write_at(offset, memoryview(data))


def put_slab(
    tensor: Outgoing,
    first: int,
    data: memoryview | np.ndarray[Any, Any],
    source_shape: tuple[int, ...],
    shape: tuple[int, ...],
) -> None:
    """Write a slab. If ``shape`` differs, the slab is the whole tensor and is broadcast to it."""
    values = data if isinstance(data, np.ndarray) else None
    if source_shape != shape:
        size = (tensor.itemsize,) if values is None else ()
        array = np.frombuffer(data, np.uint8) if values is None else values
        array = np.ascontiguousarray(np.broadcast_to(array.reshape(*source_shape, *size), (*shape, *size))).reshape(-1)
        values, data = (array, data) if values is not None else (None, array.data)
    if values is not None:
        tensor.put_values(first, values)
    else:
        assert isinstance(data, memoryview)
        tensor.put(first, data)
