"""CRC-32 of stretches that are read in any order, by any thread: put together, and compared with what a file says of them."""

from __future__ import annotations

import threading
import zlib
from typing import NamedTuple

from relight.errors import CorruptCheckpoint

_POLYNOMIAL = 0xEDB88320


class ChecksumRange(NamedTuple):
    """Bytes of a file that have a checksum."""

    name: str
    offset: int
    length: int
    crc: int


class Sums:
    """What has been read of each stretch, and the checksum of that."""

    def __init__(self) -> None:
        self._seen: dict[ChecksumRange, dict[int, tuple[int, int]]] = {}
        self._lock = threading.Lock()

    def add(self, stretch: ChecksumRange, start: int, data: memoryview) -> None:
        """``data`` is what was read of it from ``start`` on."""
        crc = zlib.crc32(data)
        with self._lock:
            self._seen.setdefault(stretch, {})[start] = len(data), crc

    def check(self, where: str) -> None:
        """``CorruptCheckpoint`` if a stretch of which all was read has another checksum. Those read in part are not judged."""
        for stretch, pieces in self._seen.items():
            at, crc = 0, 0
            for start, (length, one) in sorted(pieces.items()):
                if start != at:
                    break
                crc, at = combined(crc, one, length), at + length
            if at == stretch.length and crc != stretch.crc:
                raise CorruptCheckpoint(
                    "bytes whose checksum is another than when they were saved", where=f"{where}/{stretch.name} at {stretch.offset}"
                )


def combined(first: int, second: int, length: int) -> int:
    """The CRC-32 of two runs of bytes, one behind the other, from theirs and the second's length.

    The first is multiplied by x to the power of 8 × ``length`` modulo the polynomial, as zlib's ``crc32_combine`` does.
    """
    power, square = 1 << 31, 1 << 23  # x^0 and x^8, the lowest power in the highest bit
    while length:
        if length & 1:
            power = _times(square, power)
        square = _times(square, square)
        length >>= 1
    return _times(power, first) ^ second


def _times(a: int, b: int) -> int:
    """Product of two polynomials modulo the one of CRC-32."""
    product, bit = 0, 1 << 31
    while bit:
        if a & bit:
            product ^= b
        bit >>= 1
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
    return product
