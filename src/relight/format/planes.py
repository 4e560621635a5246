"""Elements as planes of bytes: what is alike in neighbouring elements comes to lie side by side. Pure; needs numpy.

A floating-point number is turned by one bit first, so that its exponent fills whole bytes from the top; or, where an earlier value of the
same element is known, the difference of the two bit patterns is taken, small whatever its sign. Then the element is halved, and its halves
are, down to bytes, or to blocks of several bytes that nobody could make smaller. All is done block by block, as it fits a processor's
cache: that costs about what copying does. What lies between is memory that the caller keeps: a page that is new costs more than
what is done in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK_BYTES = 1 << 19
"""Of elements that are taken at once."""
KEPT_BYTES = 8 << 20
"""No more than that is kept for each purpose."""
WIDTHS = (1, 2, 4, 8)
_UNSIGNED = {width: np.dtype(f"<u{width}") for width in WIDTHS}
_SIGNED = {width: np.dtype(f"<i{width}") for width in WIDTHS}

Elements = NDArray[Any]
"""One dimension of unsigned little-endian integers."""


def elements(data: memoryview | bytes, width: int) -> Elements:
    """The bytes as elements, without a copy. Their number must be a multiple of ``width``."""
    return np.frombuffer(data, _UNSIGNED[width])


class Rooms:
    """Memory that is used again, by what it is for: one thread's."""

    def __init__(self) -> None:
        self._held: dict[str, Elements] = {}

    def take(self, purpose: str, count: int, width: int) -> Elements:
        """So many elements, of which nothing is known: the caller's until somebody takes some for the same again."""
        held, wanted = self._held.get(purpose), count * width
        if held is None or len(held) < wanted:
            held = np.empty(wanted, "u1")
            if wanted <= KEPT_BYTES:
                self._held[purpose] = held
        return held[:wanted].view(_UNSIGNED[width])

    def pair(self, purpose: str, count: int, width: int) -> tuple[Elements, Elements]:
        """Two of them: one for what lies between, one for what that needs."""
        return self.take(f"{purpose} bits", count, width), self.take(f"{purpose} spare", count, width)


def split(
    values: Elements, widths: Sequence[int], *, turned: bool, base: Elements | None = None, rooms: Rooms | None = None
) -> list[Elements]:
    """Planes of these widths in bytes, from the top byte down; together they are an element's. They lie in ``rooms``, until somebody splits
    there again.

    ``turned``: the elements are floating-point numbers. With ``base``, as many elements of the same kind, the differences from those are
    split; ``turned`` means nothing then. One copy.
    """
    width, rows, rooms = values.itemsize, _rows(values), rooms or Rooms()
    planes = [rooms.take(f"plane {number}", len(values), one) for number, one in enumerate(widths)]
    bits, spare = rooms.pair("block", rows, width)
    for start in range(0, len(values), rows):
        block = values[start : start + rows]
        ours, other = bits[: len(block)], spare[: len(block)]
        if base is not None:
            np.subtract(block, base[start : start + rows], out=ours)
            block = _zigzag(ours, other)
        elif turned:
            np.left_shift(block, 1, out=ours)
            np.right_shift(block, 8 * width - 1, out=other)
            block = np.bitwise_or(ours, other, out=ours)
        _halve(block, other, planes, start, rooms)
    return planes


def join(planes: Sequence[Elements], into: Elements, *, turned: bool, base: Elements | None = None, rooms: Rooms | None = None) -> None:
    """The inverse of ``split``: fills ``into``. ``base`` may be ``into`` itself."""
    top, rows, rooms = 8 * into.itemsize - 1, _rows(into), rooms or Rooms()
    bits, spare = rooms.pair("block", rows, into.itemsize)
    for start in range(0, len(into), rows):
        whole = into[start : start + rows]
        ours, other = bits[: len(whole)], spare[: len(whole)]
        _double(planes, start, ours, other, rooms)
        if base is not None:
            np.add(_unzigzag(ours, other), base[start : start + len(whole)], out=whole)
        elif turned:
            np.left_shift(ours, top, out=other)
            np.right_shift(ours, 1, out=ours)
            np.bitwise_or(ours, other, out=whole)
        else:
            np.copyto(whole, ours)


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


def _rows(values: Elements) -> int:
    return max(1, min(len(values), BLOCK_BYTES // values.itemsize))


def _upper(planes: Sequence[Elements]) -> tuple[int, int]:
    """The bytes that the planes come to together, and how many of the planes are the upper half of them."""
    width, count, held = sum(plane.itemsize for plane in planes), 0, 0
    while 2 * held < width:
        held += planes[count].itemsize
        count += 1
    return width, count


def _halve(block: Elements, spare: Elements, planes: Sequence[Elements], start: int, rooms: Rooms) -> None:
    if len(planes) == 1:
        np.copyto(planes[0][start : start + len(block)], block)
        return
    width, count = _upper(planes)
    _narrow(np.right_shift(block, 4 * width, out=spare), width // 2, planes[:count], start, rooms)
    _narrow(block, width // 2, planes[count:], start, rooms)


def _narrow(block: Elements, width: int, planes: Sequence[Elements], start: int, rooms: Rooms) -> None:
    if len(planes) == 1:
        np.copyto(planes[0][start : start + len(block)], block, casting="unsafe")
    else:
        narrower, spare = rooms.pair(str(width), len(block), width)
        np.copyto(narrower, block, casting="unsafe")
        _halve(narrower, spare, planes, start, rooms)


def _double(planes: Sequence[Elements], start: int, into: Elements, spare: Elements, rooms: Rooms) -> None:
    """Fills ``into``, whose elements are as wide as the planes' together. ``spare``: as much memory, for what lies between."""
    if len(planes) == 1:
        np.copyto(into, planes[0][start : start + len(into)])
        return
    width, count = _upper(planes)
    _widen(planes[:count], start, into, rooms)
    np.left_shift(into, 4 * width, out=into)
    _widen(planes[count:], start, spare, rooms)
    np.bitwise_or(into, spare, out=into)


def _widen(planes: Sequence[Elements], start: int, into: Elements, rooms: Rooms) -> None:
    """Fills ``into``, twice as wide as the planes together."""
    if len(planes) == 1:
        np.copyto(into, planes[0][start : start + len(into)])
    else:
        half = into.itemsize // 2
        narrower, spare = rooms.pair(str(half), len(into), half)
        _double(planes, start, narrower, spare, rooms)
        np.copyto(into, narrower)


def _zigzag(difference: Elements, spare: Elements) -> Elements:
    """Small numbers for small differences of either sign, in their place."""
    signed = difference.view(_SIGNED[difference.itemsize])
    sign = np.right_shift(signed, 8 * difference.itemsize - 1, out=spare.view(signed.dtype))
    np.left_shift(difference, 1, out=difference)
    np.bitwise_xor(difference, sign.view(difference.dtype), out=difference)
    return difference


def _unzigzag(coded: Elements, spare: Elements) -> Elements:
    """The inverse, in its place."""
    np.bitwise_and(coded, 1, out=spare)
    np.negative(spare, out=spare)
    np.right_shift(coded, 1, out=coded)
    return np.bitwise_xor(coded, spare, out=coded)
