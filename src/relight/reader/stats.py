"""Compute statistics of a tensor without torch and without holding it: min, max, mean, norm, number of NaN and infinite values."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from relight.errors import ConfigError
from relight.format import dtype_named

_INTEGERS = ("uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64")
_PLAIN = frozenset({"bool", *_INTEGERS, "float16", "float32", "float64"})
"""Dtypes that numpy has under the same name."""
_COMPLEX = {"complex64": "<f4", "complex128": "<f8", "complex32": "<f2"}
_FLOAT8 = {
    "float8_e4m3fn": (4, 3, 7, False, True),
    "float8_e5m2": (5, 2, 15, True, False),
    "float8_e4m3fnuz": (4, 3, 8, False, False),
    "float8_e5m2fnuz": (5, 2, 16, False, False),
}


@dataclass(frozen=True, slots=True)
class _RunningStats:
    """Statistics of one run of elements. All but the counts are of the finite elements."""

    start: int
    least: float
    most: float
    total: float
    norm: float
    finite: int
    nan: int
    inf: int


class StatsSink:
    """Sink that keeps statistics instead of bytes. Needs numpy. Memory: a small multiple of one chunk."""

    def __init__(self, dtype: str, length: int) -> None:
        _numpy()
        self.dtype, self.length = dtype, length
        self._runs: list[_RunningStats] = []
        self._lock = threading.Lock()

    def view(self) -> memoryview | None:
        """Return None: there is no memory to read into."""
        return None

    def absorb(self, start: int, data: memoryview) -> None:
        """Add the statistics of a run of elements."""
        run = _run(self.dtype, start, data)
        if run is not None:
            with self._lock:
                self._runs.append(run)

    @property
    def runs(self) -> list[_RunningStats]:
        """Statistics of the runs, sorted by position, so that the order of arrival does not change the result."""
        return sorted(self._runs, key=lambda run: run.start)


def stats(sinks: Iterable[StatsSink]) -> dict[str, Any]:
    """Return the statistics of one tensor from the sinks of its pieces: ``min``, ``max``, ``mean``, ``norm``, ``nan``, ``inf``.

    The first four are over the finite elements. They are absent if there are no finite elements or the dtype does not have them: complex
    numbers have no order, and dtypes of less than a byte have none of the four. ``norm`` of complex numbers is over both parts.
    """
    pieces = list(sinks)
    runs = [run for sink in pieces for run in sink.runs]
    if not runs:
        return {}
    counts: dict[str, Any] = {"nan": sum(run.nan for run in runs), "inf": sum(run.inf for run in runs)}
    finite = [run for run in runs if run.finite]
    if not finite:
        return counts
    norm = {"norm": math.hypot(*(run.norm for run in finite))}
    if pieces[0].dtype in _COMPLEX:
        return norm | counts
    count = sum(run.finite for run in finite)
    least, most = min(run.least for run in finite), max(run.most for run in finite)
    return {"min": least, "max": most, "mean": math.fsum(run.total / count for run in finite), **norm, **counts}


def _run(dtype: str, start: int, data: memoryview) -> _RunningStats | None:
    np = _numpy()
    values = values_of(dtype, data)
    if values is None or not values.size:
        return None
    with np.errstate(invalid="ignore"):  # a signalling NaN is counted, not complained about
        wide = values.astype("f8")
    if values.dtype.kind in "iub":
        return _RunningStats(
            start, int(values.min()), int(values.max()), float(wide.sum()), _norm(wide), wide.size, 0, 0
        )
    nan, inf = int(np.isnan(wide).sum()), int(np.isinf(wide).sum())
    if nan or inf:
        wide = wide[np.isfinite(wide)]
    if not wide.size:
        return _RunningStats(start, 0, 0, 0, 0, 0, nan, inf)
    return _RunningStats(
        start, float(wide.min()), float(wide.max()), float(wide.sum()), _norm(wide), wide.size, nan, inf
    )


def _norm(wide: Any) -> float:
    """Return the norm, computed with scaling so that the squares of large numbers do not overflow."""
    top = float(abs(wide).max())
    return top * float(((wide / top) ** 2).sum()) ** 0.5 if top else 0.0


def are_stored_as(dtype: str) -> bool:
    """Return whether numpy can use the stored bytes unchanged, so that ``values_of`` copies nothing."""
    return dtype in _PLAIN or dtype in _COMPLEX


def values_of(dtype: str, data: memoryview) -> Any:
    """Return the elements as a numpy array; None for dtypes without numeric values."""
    np = _numpy()
    if dtype == "bfloat16":
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
    if dtype in _FLOAT8:
        return _float8_values(dtype)[np.frombuffer(data, "u1")]
    if dtype == "float8_e8m0fnu":
        codes = np.frombuffer(data, "u1")
        return np.where(codes == 255, np.nan, np.exp2(codes.astype("f8") - 127))
    if dtype in _COMPLEX:
        return np.frombuffer(data, _COMPLEX[dtype])
    if dtype in _PLAIN:
        return np.frombuffer(data, np.dtype(dtype).newbyteorder("<"))
    assert dtype_named(dtype)
    return None


@cache
def _float8_values(dtype: str) -> Any:
    return _numpy().array(_float8_table(*_FLOAT8[dtype]))


@cache
def _float8_table(
    exponent_bits: int, mantissa_bits: int, bias: int, has_inf: bool, only_top_nan: bool
) -> tuple[float, ...]:
    """Return all 256 values of an 8-bit float (arXiv:2209.05433; the ``fnuz`` kinds: arXiv:2206.02915)."""
    top = (1 << exponent_bits) - 1
    table = []
    for code in range(256):
        sign = -1.0 if code & 0x80 else 1.0
        exponent, mantissa = (code >> mantissa_bits) & top, code & ((1 << mantissa_bits) - 1)
        if has_inf and exponent == top:
            value = math.nan if mantissa else sign * math.inf
        elif (only_top_nan and code & 0x7F == 0x7F) or (not has_inf and not only_top_nan and code == 0x80):
            value = math.nan
        elif exponent == 0:
            value = sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
        else:
            value = sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)
        table.append(value)
    return tuple(table)


def _numpy() -> Any:
    try:
        import numpy
    except ImportError:
        raise ConfigError("statistics need numpy", hint="pip install numpy") from None
    return numpy
