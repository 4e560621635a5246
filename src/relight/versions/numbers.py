"""Compare two arrays of numbers in double precision, block by block, so that no large array is held."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from relight.format import DTYPES
from relight.reader.stats import are_stored_as, values_of

_ROW = 8 << 10
"""Elements of one dot product: too few for BLAS to start threads, which would cost more than they save."""
_BLOCK = 4 * _ROW
"""Elements of a block: its doubles fit into a core's own cache, and a call is long compared with a switch of threads."""
_LENGTHS_APART = 16.0
"""Largest ratio of two blocks' squares for which their product is computed from three sums instead of a fourth one. Its error is then
about 1e-15 of the product of their norms."""


@dataclass(slots=True)
class Apart:
    """Distance of two tensors of one shape. Sums are over the elements that are finite in both."""

    elements: int = 0
    changed: int = 0
    """Elements whose values differ; a NaN on both sides is no difference."""
    largest: float = 0.0
    total: float = 0.0
    """Sum of the absolute differences."""
    square: float = 0.0
    """Sum of the squared differences."""
    square_a: float = 0.0
    square_b: float = 0.0
    product: float = 0.0
    odd_a: int = 0
    """Number of elements that are not finite."""
    odd_b: int = 0
    finite: int = 0

    def add(self, other: Apart) -> None:
        """Add the distance of another part of the tensor, or of another tensor."""
        for name in (
            "elements",
            "changed",
            "total",
            "square",
            "square_a",
            "square_b",
            "product",
            "odd_a",
            "odd_b",
            "finite",
        ):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.largest = max(self.largest, other.largest)

    @property
    def mean(self) -> float:
        """The mean absolute difference."""
        return self.total / self.finite if self.finite else 0.0

    @property
    def relative(self) -> float | None:
        """Norm of the difference divided by the norm of the first; None if the first is zero and they differ."""
        return math.sqrt(self.square / self.square_a) if self.square_a else (0.0 if not self.square else None)

    @property
    def cosine(self) -> float | None:
        """Cosine of the angle between the two; None if one of them is zero."""
        below = math.sqrt(self.square_a) * math.sqrt(self.square_b)
        return max(-1.0, min(1.0, self.product / below)) if below else None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for ``--json``."""
        return {
            "elements": self.elements, "changed": self.changed, "max_abs": self.largest, "mean_abs": self.mean, "relative": self.relative,
            "cosine": self.cosine, "norm": math.sqrt(self.square), "norm_a": math.sqrt(self.square_a), "norm_b": math.sqrt(self.square_b),
            "not_finite_a": self.odd_a, "not_finite_b": self.odd_b,
        }  # fmt: skip


def compare(a: memoryview, dtype_a: str, b: memoryview, dtype_b: str) -> Apart:
    """Compare two arrays of equally many elements.

    For dtypes without numeric values, bytes are compared. If only one dtype is complex, all elements count as changed.
    """
    import numpy as np

    left, right = _values(dtype_a, a, np), _values(dtype_b, b, np)
    if left is None or right is None:
        bytes_a, bytes_b = np.frombuffer(a, np.uint8), np.frombuffer(b, np.uint8)
        if len(bytes_a) != len(bytes_b):
            return Apart(elements=len(bytes_a), changed=len(bytes_a))
        return Apart(elements=len(bytes_a), changed=int(np.count_nonzero(bytes_a != bytes_b)))
    (count, put_a), (count_b, put_b) = left, right
    if count != count_b:
        return Apart(elements=count, changed=count)
    distance = Apart(elements=count)
    x, y, apart = (np.zeros(_BLOCK) for _ in range(3))
    with np.errstate(all="ignore"):
        for start in range(0, count, _BLOCK):
            size = min(_BLOCK, count - start)
            x[size:] = y[size:] = 0.0  # zeros do not change any sum
            put_a(start, x[:size])
            put_b(start, y[:size])
            distance.finite += size
            _count(distance, x, y, apart, np)
    return distance


def _values(dtype: str, data: memoryview, np: Any) -> tuple[int, Callable[[int, Any], None]] | None:
    """Return the number of values, and a function that copies values from a start index into an array of doubles.

    None for dtypes without numeric values.
    """
    if are_stored_as(dtype):
        elements = values_of(dtype, data)
        return elements.size, lambda start, room: np.copyto(room, elements[start : start + room.size])
    size = DTYPES[dtype].itemsize
    if values_of(dtype, data[:0]) is None:
        return None

    def put(start: int, room: Any) -> None:
        np.copyto(room, values_of(dtype, data[start * size : (start + room.size) * size]))

    return len(data) // size, put


def _count(found: Apart, x: Any, y: Any, apart: Any, np: Any) -> None:
    """Add a block. Each statistic takes one pass through the core's cache. A dot product with ones takes half the time of a sum."""
    np.subtract(y, x, out=apart)
    square = _product(apart, apart, np)
    if not math.isfinite(square):  # some element is NaN, infinite, or too large to square
        _finite_only(found, x, y, apart, np)
        square = _product(apart, apart, np)
    np.abs(apart, out=apart)  # now no zero has a sign: all its bits are zero
    changed = int(np.count_nonzero(apart.view(np.int64)))
    square_a = _product(x, x, np)
    found.changed += changed
    found.square_a += square_a
    if not changed:
        found.square_b += square_a
        found.product += square_a
        return
    square_b = _product(y, y, np)
    near = (
        square_a < _LENGTHS_APART * square_b
        and square_b < _LENGTHS_APART * square_a
        and math.isfinite(square_a + square_b + square)
    )
    found.square_b += square_b
    found.product += (square_a + square_b - square) / 2 if near else _product(x, y, np)
    found.square += square
    found.total += _product(apart, np.ones(_ROW), np)
    found.largest = max(found.largest, float(apart.max()))


def _product(x: Any, y: Any, np: Any) -> float:
    """Return the dot product of two vectors, computed row by row."""
    return float(np.matmul(x.reshape(-1, 1, _ROW), y.reshape(-1, _ROW, 1)).sum())


def _finite_only(found: Apart, x: Any, y: Any, apart: Any, np: Any) -> None:
    """Count the elements that are not finite in either array, and replace them by zeros, which do not change any sum."""
    fine_x, fine_y = np.isfinite(x), np.isfinite(y)
    found.odd_a += int(x.size - np.count_nonzero(fine_x))
    found.odd_b += int(y.size - np.count_nonzero(fine_y))
    odd = ~(fine_x & fine_y)
    found.finite -= int(np.count_nonzero(odd))
    same = (x[odd] == y[odd]) | (np.isnan(x[odd]) & np.isnan(y[odd]))
    found.changed += int(np.count_nonzero(~same))
    for block in (x, y, apart):
        block[odd] = 0.0
