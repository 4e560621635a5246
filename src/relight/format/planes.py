"""Split elements into planes of bytes, so that similar bytes of neighbouring elements are adjacent; and join them. Pure; needs numpy.

First, the bits of a floating-point number are rotated left by one, so that its exponent fills whole bytes from the top. If an earlier value
of the same element is known, the difference of the two bit patterns is taken instead, zigzag-coded, so that small differences of either
sign become small numbers. Then the element is halved, and its halves again, down to single bytes, or to blocks of several incompressible
bytes. Everything is done in blocks that fit a processor's cache, at about the cost of a copy. The caller keeps the temporary memory:
a page fault costs more than the work in the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK_BYTES = 1 << 19
"""Bytes of elements that are processed at once."""
KEPT_BYTES = 8 << 20
"""Largest buffer that ``Rooms`` keeps for each purpose, in bytes."""
WIDTHS = (1, 2, 4, 8)
_UNSIGNED = {width: np.dtype(f"<u{width}") for width in WIDTHS}
_SIGNED = {width: np.dtype(f"<i{width}") for width in WIDTHS}

Elements = NDArray[Any]
"""One dimension of unsigned little-endian integers."""


def elements(data: memoryview | bytes, width: int) -> Elements:
    """Return the bytes as elements, without a copy. Their number must be a multiple of ``width``."""
    return np.frombuffer(data, _UNSIGNED[width])


class Rooms:
    """Reusable buffers of one thread, by purpose."""

    def __init__(self) -> None:
        self._held: dict[str, Elements] = {}

    def take(self, purpose: str, count: int, width: int) -> Elements:
        """Return ``count`` uninitialised elements. They are valid until the next call for the same purpose."""
        buffer, wanted = self._held.get(purpose), count * width
        if buffer is None or len(buffer) < wanted:
            buffer = np.empty(wanted, "u1")
            if wanted <= KEPT_BYTES:
                self._held[purpose] = buffer
        return buffer[:wanted].view(_UNSIGNED[width])

    def pair(self, purpose: str, count: int, width: int) -> tuple[Elements, Elements]:
        """Return two such buffers: one for an intermediate result, and a spare one."""
        return self.take(f"{purpose} bits", count, width), self.take(f"{purpose} spare", count, width)


def split(
    values: Elements, widths: Sequence[int], *, turned: bool, base: Elements | None = None, rooms: Rooms | None = None
) -> list[Elements]:
    """Return planes of these widths in bytes, from the top byte down. The widths add up to an element's.

    The planes are in ``rooms``, and valid until the next split there. ``turned``: the elements are floating-point numbers. With ``base``,
    as many elements of the same kind, the differences from these are split, and ``turned`` is ignored. Cost: one copy.
    """
    width, rows, rooms = values.itemsize, _rows(values), rooms or Rooms()
    planes = [rooms.take(f"plane {number}", len(values), plane_width) for number, plane_width in enumerate(widths)]
    bits, spare = rooms.pair("block", rows, width)
    for start in range(0, len(values), rows):
        block = values[start : start + rows]
        ours, other = bits[: len(block)], spare[: len(block)]
        if base is not None:
            np.subtract(block, base[start : start + rows], out=ours)
            block = _zigzag(ours, other)
        elif turned:
            _left_shift(block, 1, ours)
            np.right_shift(block, 8 * width - 1, out=other)
            block = np.bitwise_or(ours, other, out=ours)
        _halve(block, other, planes, start, rooms)
    return planes


def join(
    planes: Sequence[Elements],
    into: Elements,
    *,
    turned: bool,
    base: Elements | None = None,
    rooms: Rooms | None = None,
) -> None:
    """Fill ``into`` from planes: the inverse of ``split``. ``base`` may be ``into`` itself."""
    top, rows, rooms = 8 * into.itemsize - 1, _rows(into), rooms or Rooms()
    bits, spare = rooms.pair("block", rows, into.itemsize)
    for start in range(0, len(into), rows):
        whole = into[start : start + rows]
        ours, other = bits[: len(whole)], spare[: len(whole)]
        _double(planes, start, ours, other, rooms)
        if base is not None:
            np.add(_unzigzag(ours, other), base[start : start + len(whole)], out=whole)
        elif turned:
            _left_shift(ours, top, other)
            np.right_shift(ours, 1, out=ours)
            np.bitwise_or(ours, other, out=whole)
        else:
            np.copyto(whole, ours)


def widths_of(width: int, single: int) -> tuple[int, ...]:
    """Return plane widths for an element of ``width`` bytes: its uppermost ``single`` bytes each in its own plane, the rest in blocks.

    For 8 bytes and 2 single ones ``(1, 1, 2, 4)``; with 0 single ones, the element is not split.
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
    """Return the total width of the planes in bytes, and the number of planes in its upper half."""
    width, count, upper = sum(plane.itemsize for plane in planes), 0, 0
    while 2 * upper < width:
        upper += planes[count].itemsize
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
    """Fill ``into``, with elements as wide as all planes together. ``spare``: memory of the same size for intermediate results."""
    if len(planes) == 1:
        np.copyto(into, planes[0][start : start + len(into)])
        return
    width, count = _upper(planes)
    _widen(planes[:count], start, into, rooms)
    _left_shift(into, 4 * width, into)
    _widen(planes[count:], start, spare, rooms)
    np.bitwise_or(into, spare, out=into)


def _widen(planes: Sequence[Elements], start: int, into: Elements, rooms: Rooms) -> None:
    """Fill ``into``, with elements twice as wide as all planes together."""
    if len(planes) == 1:
        np.copyto(into, planes[0][start : start + len(into)])
    else:
        half = into.itemsize // 2
        narrower, spare = rooms.pair(str(half), len(into), half)
        _double(planes, start, narrower, spare, rooms)
        np.copyto(into, narrower)


def _left_shift(values: Elements, bits: int, into: Elements) -> None:
    """Shift left. NumPy shifts elements of 1 byte 13 times as slowly as it multiplies them, and elements of 2 bytes half as fast."""
    if values.itemsize <= 2:
        np.multiply(values, values.dtype.type(1 << bits), out=into)
    else:
        np.left_shift(values, bits, out=into)


def _zigzag(difference: Elements, spare: Elements) -> Elements:
    """Replace differences by their zigzag code, in place: small numbers for small differences of either sign."""
    signed = difference.view(_SIGNED[difference.itemsize])
    sign = np.right_shift(signed, 8 * difference.itemsize - 1, out=spare.view(signed.dtype))
    _left_shift(difference, 1, difference)
    np.bitwise_xor(difference, sign.view(difference.dtype), out=difference)
    return difference


def _unzigzag(coded: Elements, spare: Elements) -> Elements:
    """Replace zigzag codes by the differences, in place."""
    np.bitwise_and(coded, 1, out=spare)
    np.negative(spare, out=spare)
    np.right_shift(coded, 1, out=coded)
    return np.bitwise_xor(coded, spare, out=coded)
