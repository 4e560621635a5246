"""CRC32 of runs that were summed apart, as of one. Pure."""

from __future__ import annotations

from collections.abc import Sequence

_POLYNOMIAL = 0xEDB88320


def joined_crc(runs: Sequence[tuple[int, int, int]]) -> int:
    """The CRC32 of bytes that runs ``(begin, length, CRC32)`` tile, in any order.

    (M. Adler, zlib's ``crc32_combine``: a run behind is a multiplication by a power of x, modulo the polynomial.)
    """
    total = at = 0
    for begin, length, value in sorted(runs):
        assert begin == at, "runs that do not tile"
        total = _times(_power(length), total) ^ value if at else value
        at += length
    return total


def _times(one: int, other: int) -> int:
    """The product of two polynomials whose highest bit is the power 0."""
    product, bit = 0, 1 << 31
    while bit:
        if one & bit:
            product ^= other
        other = other >> 1 ^ _POLYNOMIAL if other & 1 else other >> 1
        bit >>= 1
    return product


def _power(length: int) -> int:
    """x to the power of 8 × length."""
    power, square, left = 1 << 31, 1 << 23, length
    while left:
        if left & 1:
            power = _times(square, power)
        square = _times(square, square)
        left >>= 1
    return power
