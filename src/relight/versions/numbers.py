"""What differs between two runs of numbers: counted in double precision, block by block, so that nothing large is held."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from relight.catalog.stats import values_of

_BLOCK = 8 << 10
"""Elements at a time: blocks of doubles that stay in a core's own cache, and too short for the linear algebra's own threads, which take
more than they give."""


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
    """Two runs of as many elements. Of kinds without values of their own, whether the bytes are the same."""
    import numpy as np

    left, right = values_of(dtype_a, a), values_of(dtype_b, b)
    if left is None or right is None:
        one, other = np.frombuffer(a, np.uint8), np.frombuffer(b, np.uint8)
        if len(one) != len(other):
            return Apart(elements=len(one), changed=len(one))
        return Apart(elements=len(one), changed=int(np.count_nonzero(one != other)))
    found = Apart(elements=left.size)
    rooms = [np.empty(_BLOCK) for _ in range(3)]
    with np.errstate(all="ignore"):
        for start in range(0, left.size, _BLOCK):
            x, y = left[start : start + _BLOCK], right[start : start + _BLOCK]
            wide_x, wide_y, apart = (room[: x.size] for room in rooms)
            np.copyto(wide_x, x)
            np.copyto(wide_y, y)
            _count(found, wide_x, wide_y, apart, np)
    return found


def _count(found: Apart, x: Any, y: Any, apart: Any, np: Any) -> None:
    np.subtract(y, x, out=apart)
    square = float(np.dot(apart, apart))
    if not math.isfinite(square):  # something in it is no number, or too large for squares
        x, y, apart, square = _finite_only(found, x, y, np)
    else:
        found.changed += int(np.count_nonzero(apart))
    found.finite += x.size
    if not x.size:
        return
    found.square_a += float(np.dot(x, x))
    found.square_b += float(np.dot(y, y))
    if square == 0.0 and not apart.any():
        found.product += float(np.dot(x, x))
        return
    found.product += float(np.dot(x, y))
    found.square += square
    np.abs(apart, out=apart)
    found.total += float(apart.sum())
    found.largest = max(found.largest, float(apart.max()))


def _finite_only(found: Apart, x: Any, y: Any, np: Any) -> tuple[Any, Any, Any, float]:
    fine_x, fine_y = np.isfinite(x), np.isfinite(y)
    found.odd_a += int(x.size - np.count_nonzero(fine_x))
    found.odd_b += int(y.size - np.count_nonzero(fine_y))
    both = fine_x & fine_y
    odd = ~both
    same = (x[odd] == y[odd]) | (np.isnan(x[odd]) & np.isnan(y[odd]))
    found.changed += int(np.count_nonzero(~same))
    x, y = x[both], y[both]
    apart = y - x
    found.changed += int(np.count_nonzero(apart))
    return x, y, apart, float(np.dot(apart, apart))
