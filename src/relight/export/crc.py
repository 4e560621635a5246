"""Combine the CRC32s of several runs of bytes. Pure."""

from __future__ import annotations

from collections.abc import Sequence

_POLYNOMIAL = 0xEDB88320


def joined_crc(runs: Sequence[tuple[int, int, int]]) -> int:
    """Return the CRC32 of bytes that runs ``(begin, length, CRC32)``, in any order, cover without gaps.

    (M. Adler, zlib's ``crc32_combine``: appending a run multiplies by a power of x, modulo the polynomial.)
    """
    total = position = 0
    for begin, length, value in sorted(runs):
        assert begin == position, "runs that do not tile"
        total = _times(_power(length), total) ^ value if position else value
        position += length
    return total


def _times(factor: int, other: int) -> int:
    """Return the product of two polynomials. The highest bit is the coefficient of x⁰."""
    product, bit = 0, 1 << 31
    while bit:
        if factor & bit:
            product ^= other
        other = other >> 1 ^ _POLYNOMIAL if other & 1 else other >> 1
        bit >>= 1
    return product


def _power(length: int) -> int:
    """Return x to the power of 8 × length."""
    power, square, exponent = 1 << 31, 1 << 23, length
    while exponent:
        if exponent & 1:
            power = _times(square, power)
        square = _times(square, square)
        exponent >>= 1
    return power
