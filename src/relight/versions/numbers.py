"""What differs between two runs of numbers: counted in double precision, block by block, so that nothing large is held."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from relight.catalog.stats import are_stored_as, values_of
from relight.format import DTYPES

_ROW = 8 << 10
"""Elements of one product: too short for the linear algebra's own threads, which take more than they give."""
_BLOCK = 4 * _ROW
"""Elements at a time: blocks of doubles that stay in a core's own cache, and calls that are long enough beside the threads' handing over to
each other."""
_LENGTHS_APART = 16.0
"""Up to which ratio of two blocks' squares their product is had from three sums instead of a fourth: it then is right to some 1e-15 of the
product of their norms."""


@dataclass(slots=True)
class Apart:
    """How far two tensors of one shape are apart. Sums are over the elements that are finite in both."""

    elements: int = 0
    changed: int = 0
    """Elements whose values differ; a NaN on both sides is no difference."""
    largest: float = 0.0
    total: float = 0.0
    """Of the absolute differences."""
    square: float = 0.0
    """Of the differences."""
    square_a: float = 0.0
    square_b: float = 0.0
    product: float = 0.0
    odd_a: int = 0
    """How many are not finite."""
    odd_b: int = 0
    finite: int = 0

    def add(self, other: Apart) -> None:
        """Count in what another part of the tensor, or another tensor, has shown."""
        for name in ("elements", "changed", "total", "square", "square_a", "square_b", "product", "odd_a", "odd_b", "finite"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.largest = max(self.largest, other.largest)

    @property
    def mean(self) -> float:
        """The mean absolute difference."""
        return self.total / self.finite if self.finite else 0.0

    @property
    def relative(self) -> float | None:
        """The norm of the difference beside that of the first; None beside nothing."""
        return math.sqrt(self.square / self.square_a) if self.square_a else (0.0 if not self.square else None)

    @property
    def cosine(self) -> float | None:
        """Of the angle between the two; None if one of them is nothing."""
        below = math.sqrt(self.square_a) * math.sqrt(self.square_b)
        return max(-1.0, min(1.0, self.product / below)) if below else None

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "elements": self.elements, "changed": self.changed, "max_abs": self.largest, "mean_abs": self.mean, "relative": self.relative,
            "cosine": self.cosine, "norm": math.sqrt(self.square), "norm_a": math.sqrt(self.square_a), "norm_b": math.sqrt(self.square_b),
            "not_finite_a": self.odd_a, "not_finite_b": self.odd_b,
        }  # fmt: skip


def compare(a: memoryview, dtype_a: str, b: memoryview, dtype_b: str) -> Apart:
    """Two runs of as many elements. Of kinds without values of their own, whether the bytes are the same; between kinds of which one has
    two parts a value, all are changed."""
    import numpy as np

    left, right = _values(dtype_a, a, np), _values(dtype_b, b, np)
    if left is None or right is None:
        one, other = np.frombuffer(a, np.uint8), np.frombuffer(b, np.uint8)
        if len(one) != len(other):
            return Apart(elements=len(one), changed=len(one))
        return Apart(elements=len(one), changed=int(np.count_nonzero(one != other)))
    (count, put_a), (count_b, put_b) = left, right
    if count != count_b:
        return Apart(elements=count, changed=count)
    found = Apart(elements=count)
    x, y, apart = (np.zeros(_BLOCK) for _ in range(3))
    with np.errstate(all="ignore"):
        for start in range(0, count, _BLOCK):
            size = min(_BLOCK, count - start)
            x[size:] = y[size:] = 0.0  # counts for nothing
            put_a(start, x[:size])
            put_b(start, y[:size])
            found.finite += size
            _count(found, x, y, apart, np)
    return found


def _values(dtype: str, data: memoryview, np: Any) -> tuple[int, Callable[[int, Any], None]] | None:
    """How many there are, and what puts those from one on into a room of doubles. None: they have no values."""
    if are_stored_as(dtype):
        held = values_of(dtype, data)
        return held.size, lambda start, room: np.copyto(room, held[start : start + room.size])
    size = DTYPES[dtype].itemsize
    if values_of(dtype, data[:0]) is None:
        return None

    def put(start: int, room: Any) -> None:
        np.copyto(room, values_of(dtype, data[start * size : (start + room.size) * size]))

    return len(data) // size, put


def _count(found: Apart, x: Any, y: Any, apart: Any, np: Any) -> None:
    """Count a block in. Each number takes one pass through the core's cache; a sum is a product with ones, in half a sum's time."""
    np.subtract(y, x, out=apart)
    square = _product(apart, apart, np)
    if not math.isfinite(square):  # something in it is no number, or too large for squares
        _finite_only(found, x, y, apart, np)
        square = _product(apart, apart, np)
    np.abs(apart, out=apart)  # and no zero has a sign any more: all its bits are zero
    changed = int(np.count_nonzero(apart.view(np.int64)))
    square_a = _product(x, x, np)
    found.changed += changed
    found.square_a += square_a
    if not changed:
        found.square_b += square_a
        found.product += square_a
        return
    square_b = _product(y, y, np)
    near = square_a < _LENGTHS_APART * square_b and square_b < _LENGTHS_APART * square_a and math.isfinite(square_a + square_b + square)
    found.square_b += square_b
    found.product += (square_a + square_b - square) / 2 if near else _product(x, y, np)
    found.square += square
    found.total += _product(apart, np.ones(_ROW), np)
    found.largest = max(found.largest, float(apart.max()))


def _product(x: Any, y: Any, np: Any) -> float:
    """Of two vectors, row by row."""
    return float(np.matmul(x.reshape(-1, 1, _ROW), y.reshape(-1, _ROW, 1)).sum())


def _finite_only(found: Apart, x: Any, y: Any, apart: Any, np: Any) -> None:
    """Count what is not finite in one of them, and put zeros there, which count for nothing."""
    fine_x, fine_y = np.isfinite(x), np.isfinite(y)
    found.odd_a += int(x.size - np.count_nonzero(fine_x))
    found.odd_b += int(y.size - np.count_nonzero(fine_y))
    odd = ~(fine_x & fine_y)
    found.finite -= int(np.count_nonzero(odd))
    same = (x[odd] == y[odd]) | (np.isnan(x[odd]) & np.isnan(y[odd]))
    found.changed += int(np.count_nonzero(~same))
    for one in (x, y, apart):
        one[odd] = 0.0
