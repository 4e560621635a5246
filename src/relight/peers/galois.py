"""Arithmetic in GF(256), and the coefficients of parity: any k of k + m pieces give back the rest.

Parity row r is the sum over the members of ``coefficient(r, member) * data``. Row 0 has only ones, so it is plain XOR.
The other rows are rows of a Cauchy matrix, each times a constant; row 0 is that matrix's row "at infinity". So every
square submatrix has an inverse, and any losses up to the number of rows can be rebuilt.

*How bytes encode elements.* A block of ``BLOCK`` bytes is eight *planes*, and plane t holds bit t of its elements. A
multiplication by a constant is a matrix of eight by eight bits, so each plane of the product is the XOR of some planes
of the data. numpy computes the XOR of such long runs at memory speed. (Blömer, Kalfane, Karp, Karpinski, Luby,
Zuckerman: *An XOR-based erasure-resilient coding scheme*, 1995.) A table of products, two bytes at a time, is slower:
1.1 GB/s here for each factor.

The members' coefficients in row 1 are the field's elements that need the fewest XORs; the constants of rows 2 and 3
were searched for with the same aim. None of them may change: pieces in memory would decode to wrong bytes. May be used
from any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy

from relight.errors import ConfigError

PLANE = 16 << 10
BLOCK = 8 * PLANE
"""Data is cut, padded and decoded in multiples of this many bytes. Plain XOR (factor 1) takes any length."""
ROWS_MAX, MEMBERS_MAX = 4, 32
_POLYNOMIAL = 0x11D
_INFINITY = -1
_ROWS = ((_INFINITY, 1), (0, 1), (49, 197), (140, 66))
"""For each row, its x in the Cauchy matrix 1 / (x + y), and its constant factor."""


def multiply(a: int, b: int) -> int:
    """Return the product of two elements."""
    exp, log = _tables()
    return exp[log[a] + log[b]] if a and b else 0


def invert(a: int) -> int:
    """Return the multiplicative inverse of ``a``. ``ZeroDivisionError`` for 0."""
    if not a:
        raise ZeroDivisionError("0 has no inverse in GF(256)")
    exp, log = _tables()
    return exp[255 - log[a]]


def coefficient(row: int, member: int) -> int:
    """Return the factor of ``member``'s data in parity row ``row``. ``ConfigError`` outside 4 rows of 32 members."""
    if not (0 <= row < ROWS_MAX and 0 <= member < MEMBERS_MAX):
        raise ConfigError(
            f"there is no parity row {row} of member {member}: at most {ROWS_MAX} rows, {MEMBERS_MAX} members"
        )
    x, scale = _ROWS[row]
    return 1 if x == _INFINITY else multiply(scale, invert(x ^ _ys()[member]))


def solve(matrix: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the inverse of a small square matrix. ``ConfigError`` if it has none."""
    size = len(matrix)
    work = [[*line, *(int(i == j) for j in range(size))] for i, line in enumerate(matrix)]
    for column in range(size):
        pivot = next((i for i in range(column, size) if work[i][column]), None)
        if pivot is None:
            raise ConfigError("too few parity pieces are left to rebuild the missing data")
        work[column], work[pivot] = work[pivot], work[column]
        factor = invert(work[column][column])
        work[column] = [multiply(factor, value) for value in work[column]]
        for i in range(size):
            if i != column and (factor := work[i][column]):
                work[i] = [value ^ multiply(factor, other) for value, other in zip(work[i], work[column])]
    return [line[size:] for line in work]


def weigh(
    missing: Sequence[int], rows: Sequence[int], known: Sequence[int], target: int
) -> tuple[list[int], list[int]]:
    """Return the factors that rebuild ``target``, one of the ``missing`` members: of the parity ``rows``, and of the
    ``known`` members.

    There are as many rows as missing members. The target is the sum of ``factor * bytes`` over both.
    """
    inverse = solve([[coefficient(row, member) for member in missing] for row in rows])
    of_rows = inverse[list(missing).index(target)]
    of_known = []
    for member in known:
        total = 0
        for factor, row in zip(of_rows, rows):
            total ^= multiply(factor, coefficient(row, member))
        of_known.append(total)
    return of_rows, of_known


def accumulate(into: memoryview, data: memoryview, factor: int) -> None:
    """Add ``factor * data`` to ``into``. Both are contiguous, of equal length, and whole blocks unless the factor is 0
    or 1.

    Cost: one XOR of ``data`` for the factor 1 (some 10 to 20 GB/s), two to five times as long for other factors.
    Releases the GIL.
    """
    if len(into) != len(data):
        raise ValueError(f"{len(data)} bytes cannot be added to {len(into)}")
    if factor == 0 or not len(data):
        return
    if factor == 1:
        _add(into, data)
        return
    if len(data) % BLOCK:
        raise ValueError(f"{len(data)} bytes are not whole blocks of {BLOCK}")
    plan = _planes(factor)
    for start in range(0, len(data), BLOCK):
        target = list(numpy.frombuffer(into[start : start + BLOCK], numpy.uint64).reshape(8, -1))
        source = list(numpy.frombuffer(data[start : start + BLOCK], numpy.uint64).reshape(8, -1))
        for out, part in plan:
            numpy.bitwise_xor(target[out], source[part], target[out])


def _add(into: memoryview, data: memoryview) -> None:
    whole = len(data) & ~7
    target, source = numpy.frombuffer(into, numpy.uint8), numpy.frombuffer(data, numpy.uint8)
    words = target[:whole].view(numpy.uint64)
    numpy.bitwise_xor(words, source[:whole].view(numpy.uint64), words)
    if whole < len(data):
        numpy.bitwise_xor(target[whole:], source[whole:], target[whole:])


@cache
def _tables() -> tuple[list[int], list[int]]:
    """Return the powers of 2, repeated twice, and the logarithms to base 2."""
    exp, log, value = [0] * 512, [0] * 256, 1
    for power in range(255):
        exp[power] = exp[power + 255] = value
        log[value] = power
        value = value << 1 ^ (_POLYNOMIAL if value & 128 else 0)
    return exp, log


@cache
def _planes(factor: int) -> list[tuple[int, int]]:
    """Return ``(plane of the product, plane of the data)`` for each XOR of a multiplication by ``factor``."""
    return [(out, part) for out in range(8) for part in range(8) if multiply(factor, 1 << part) >> out & 1]


@cache
def _ys() -> list[int]:
    """Return each member's y.

    Row 1 has 1 / y, so these are the inverses of the elements that are quickest to multiply by.
    """
    quick = sorted(range(1, 256), key=lambda element: (len(_planes(element)), element))
    return [invert(element) for element in quick[:MEMBERS_MAX]]
