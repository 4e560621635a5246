"""CRC-32 of ranges that are read in any order, by any thread: combined, and compared with the checksums in the file."""

from __future__ import annotations

import threading
from typing import NamedTuple

from relight.errors import CorruptCheckpoint
from relight.format.crc import combined, crc32


class ChecksumRange(NamedTuple):
    """A range of a file that has a checksum."""

    name: str
    offset: int
    length: int
    crc: int


class Sums:
    """The parts read of each range, with their checksums."""

    def __init__(self) -> None:
        self._seen: dict[ChecksumRange, dict[int, tuple[int, int]]] = {}
        self._lock = threading.Lock()

    def add(self, stretch: ChecksumRange, start: int, data: memoryview) -> None:
        """Record ``data``, which was read at ``start`` of the range."""
        crc = crc32(data)
        with self._lock:
            self._seen.setdefault(stretch, {})[start] = len(data), crc

    def check(self, where: str) -> None:
        """Raise ``CorruptCheckpoint`` if a range that was read completely has a wrong checksum. Ranges read in part
        are not checked."""
        for stretch, pieces in self._seen.items():
            end, crc = 0, 0
            for start, (length, piece_crc) in sorted(pieces.items()):
                if start != end:
                    break
                crc, end = combined(crc, piece_crc, length), end + length
            if end == stretch.length and crc != stretch.crc:
                raise CorruptCheckpoint(
                    "the checksum of these bytes is wrong", where=f"{where}/{stretch.name} at {stretch.offset}"
                )
