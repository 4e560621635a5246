"""Elements as planes of bytes: what is alike in neighbouring elements comes to lie side by side. Pure; needs numpy.

A floating-point number is turned by one bit first, so that its exponent fills whole bytes from the top; or, where an earlier value of the
same element is known, the difference of the two bit patterns is taken, small whatever its sign. Then the element is halved, and its halves
are, down to bytes, or to blocks of several bytes that nobody could make smaller. All is done block by block, as it fits a processor's
cache: that costs about what copying does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK = 1 << 15
"""Elements that are taken at once."""
WIDTHS = (1, 2, 4, 8)
_UNSIGNED = {width: np.dtype(f"<u{width}") for width in WIDTHS}
_SIGNED = {width: np.dtype(f"<i{width}") for width in WIDTHS}

Elements = NDArray[Any]
"""One dimension of unsigned little-endian integers."""


def elements(data: memoryview | bytes, width: int) -> Elements:
    """The bytes as elements, without a copy. Their number must be a multiple of ``width``."""
    return np.frombuffer(data, _UNSIGNED[width])


def split(values: Elements, widths: Sequence[int], *, turned: bool, base: Elements | None = None) -> list[Elements]:
    """Planes of these widths in bytes, from the top byte down; together they are an element's.

    ``turned``: the elements are floating-point numbers. With ``base``, as many elements of the same kind, the differences from those are
    split; ``turned`` means nothing then. One copy.
    """
    width = values.itemsize
    planes = [np.empty(len(values), _UNSIGNED[one]) for one in widths]
    for start in range(0, len(values), BLOCK):
        block = values[start : start + BLOCK]
        if base is not None:
            block = _zigzag(block - base[start : start + BLOCK])
        elif turned:
            block = (block << 1) | (block >> (8 * width - 1))
        _halve(block, planes, start)
    return planes


def join(planes: Sequence[Elements], into: Elements, *, turned: bool, base: Elements | None = None) -> None:
    """The inverse of ``split``: fills ``into``. ``base`` may be ``into`` itself."""
    bits = 8 * into.itemsize
    for start in range(0, len(into), BLOCK):
        end = min(start + BLOCK, len(into))
        block = _double(planes, start, end)
        if base is not None:
            block = _unzigzag(block) + base[start:end]
        elif turned:
            block = (block >> 1) | (block << (bits - 1))
        into[start:end] = block


def widths_of(width: int, single: int) -> tuple[int, ...]:
    """How an element is cut so that its uppermost ``single`` bytes are planes of their own, and what is below lies in blocks.

    An element of 8 bytes with 2 gives ``(1, 1, 2, 4)``; with 0 it is left whole.
    """
    if width == 1 or single == 0:
        return (width,)
    half = width // 2
    if single <= half:
        return (*widths_of(half, single), half)
    return (1,) * half + widths_of(half, single - half)


def _halve(block: Elements, planes: list[Elements], start: int) -> None:
    width = block.itemsize
    if planes[0].itemsize == width:
        planes[0][start : start + len(block)] = block
        return
    half, count = width // 2, 0
    while sum(plane.itemsize for plane in planes[:count]) < half:
        count += 1
    _narrow(block >> (4 * width), half, planes[:count], start)
    _narrow(block, half, planes[count:], start)


def _narrow(block: Elements, width: int, planes: list[Elements], start: int) -> None:
    if len(planes) == 1:
        np.copyto(planes[0][start : start + len(block)], block, casting="unsafe")
    else:
        _halve(block.astype(_UNSIGNED[width]), planes, start)


def _double(planes: Sequence[Elements], start: int, end: int) -> Elements:
    if len(planes) == 1:
        return planes[0][start:end]
    width, count = sum(plane.itemsize for plane in planes), 0
    while sum(plane.itemsize for plane in planes[:count]) < width // 2:
        count += 1
    high: Elements = _double(planes[:count], start, end).astype(_UNSIGNED[width])
    np.left_shift(high, 4 * width, out=high)
    np.bitwise_or(high, _double(planes[count:], start, end), out=high)
    return high


def _zigzag(difference: Elements) -> Elements:
    """Small numbers for small differences of either sign."""
    sign = difference.view(_SIGNED[difference.itemsize]) >> (8 * difference.itemsize - 1)
    return (difference << 1) ^ sign.view(difference.dtype)


def _unzigzag(coded: Elements) -> Elements:
    return (coded >> 1) ^ (0 - (coded & 1))
