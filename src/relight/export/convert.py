"""Convert between dtypes, rounding to nearest, ties to even, and count overflows."""

from __future__ import annotations

from typing import Any

import numpy as np

from relight.errors import ConfigError
from relight.format import DTYPES

SHORT = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}
"""Short names of dtypes."""
FLOATS = ("float64", "float32", "float16", "bfloat16")
"""Dtypes that are converted. Others stay unchanged: integers, booleans, and smaller floats, which were chosen on purpose."""


def dtype_meant(text: str) -> str:
    """Return the dtype that ``text`` names. Raise ``ConfigError`` if it is not one of ``FLOATS``."""
    name = SHORT.get(text, text)
    if name not in FLOATS:
        raise ConfigError(f"cannot convert to {text[:40]!r}", hint=f"one of {', '.join(SHORT)}")
    return name


def target_of(dtype: str, wanted: str | None) -> str:
    """Return the dtype in which a tensor of ``dtype`` is written."""
    return wanted if wanted is not None and dtype in FLOATS else dtype


def widened(data: memoryview, dtype: str) -> np.ndarray[Any, Any]:
    """Return floats as a numpy array; bfloat16 becomes float32. A view of ``data`` where possible."""
    if dtype == "bfloat16":
        return (np.frombuffer(data, "<u2").astype("<u4") << np.uint32(16)).view("<f4")
    return np.frombuffer(data, {"float64": "<f8", "float32": "<f4", "float16": "<f2"}[dtype])


def narrowed(values: np.ndarray[Any, Any], dtype: str) -> tuple[memoryview, int]:
    """Return values as bytes of ``dtype``, and the number of finite values that became infinite."""
    with np.errstate(all="ignore"):
        if dtype == "bfloat16":
            out = _to_bfloat16(values)
            over = int(np.count_nonzero(((out & 0x7FFF) == 0x7F80) & np.isfinite(values)))
        else:
            out = np.ascontiguousarray(
                values.astype({"float64": "<f8", "float32": "<f4", "float16": "<f2"}[dtype], copy=False)
            )
            fits = out.dtype.itemsize >= values.dtype.itemsize
            over = 0 if fits else int(np.count_nonzero(np.isinf(out) & np.isfinite(values)))
    return out.reshape(-1).view(np.uint8).data, over


def converted(data: memoryview, dtype: str, target: str) -> tuple[memoryview, int]:
    """Convert bytes of ``dtype`` to bytes of ``target``. Return them, and the number of overflows."""
    if dtype == target or not len(data):
        return data, 0
    assert DTYPES[dtype].itemsize
    return narrowed(widened(data, dtype), target)


def _to_bfloat16(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if values.dtype.itemsize == 8:
        values = _to_odd(values)
    single = values.astype("<f4", copy=False)
    bits = np.ascontiguousarray(single).view("<u4")
    up = (bits >> np.uint32(16)) & np.uint32(1)
    up += np.uint32(0x7FFF)
    up += bits  # a NaN may overflow here; it is replaced below
    up >>= np.uint32(16)
    out = up.astype("<u2")
    nan = np.isnan(single)
    if nan.any():
        out[nan] = ((bits[nan] >> np.uint32(16)) & np.uint32(0x8000)).astype("<u2") | np.uint16(0x7FC0)
    return out


def _to_odd(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Convert float64 to float32, rounded to odd: the last bit shows lost bits, so that a second rounding equals a single one.

    (S. Boldo, G. Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008.)
    """
    single = values.astype("<f4")
    bits = single.view("<u4")
    off = np.isfinite(values) & (single.astype("<f8") != values)
    too_far = off & (np.abs(single.astype("<f8")) > np.abs(values))
    bits[too_far] -= np.uint32(1)
    bits[off] |= np.uint32(1)
    return single
