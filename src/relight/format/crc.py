"""CRC-32 of bytes, as in zip files, and of concatenated bytes. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from fastcrc.crc32 import iso_hdlc

_POLYNOMIAL = 0xEDB88320


def crc32(data: bytes | memoryview, first: int = 0) -> int:
    """Return the CRC-32 of ``data``, equal to zlib's. ``first``: the CRC-32 of the bytes before it."""
    return iso_hdlc(data, first)


def joined_crc(runs: Iterable[tuple[int, int, int]]) -> int:
    """Return the CRC-32 of bytes that runs ``(begin, length, CRC-32)``, in any order, cover without gaps."""
    total = position = 0
    for begin, length, value in sorted(runs):
        assert begin == position, "runs that do not tile"
        total = combined(total, value, length)
        position += length
    return total


def combined(first: int, second: int, length: int) -> int:
    """Return the CRC-32 of two concatenated byte strings, from their checksums and the second's length.

    The first is multiplied by x to the power of 8 × ``length`` modulo the polynomial, like zlib's ``crc32_combine``.
    """
    power, square = 1 << 31, 1 << 23  # x^0 and x^8, the lowest power in the highest bit
    while length:
        if length & 1:
            power = _times(square, power)
        square = _times(square, square)
        length >>= 1
    return _times(power, first) ^ second


def _times(a: int, b: int) -> int:
    """Return the product of two polynomials modulo the one of CRC-32."""
    product, bit = 0, 1 << 31
    while bit:
        if a & bit:
            product ^= b
        bit >>= 1
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
    return product
