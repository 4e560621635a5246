"""Times, sizes and rates as callers pass them, in seconds and bytes. Every argument and setting uses these checks."""

from __future__ import annotations

import math
import operator
from typing import Any

from relight.errors import ConfigError, shown
from relight.units import Duration, Rate, Size, parse_duration, parse_rate, parse_size

_SIZE_UNITS = "units: kB MB GB TB (decimal), KiB MiB GiB TiB (binary); a number counts bytes"


def seconds_of(amount: Duration, what: str) -> float:
    """Return the seconds of ``"36h"``, ``"7d"``, ``"90m"``, a ``timedelta``, or a number above 0. ``what`` names the
    argument in the error."""
    if isinstance(amount, str):
        seconds = parse_duration(amount) or math.nan
    else:
        seconds = float_of(amount.total_seconds() if callable(getattr(amount, "total_seconds", None)) else amount)  # type: ignore[union-attr]
    if not 0 < seconds < math.inf:
        hint = "units: s m h d w; a number counts seconds"
        raise ConfigError(f"{what} must be a time such as '30s', '10m' or '36h', not {shown(amount)}", hint=hint)
    return seconds


def rate_of(amount: Rate, what: str) -> float:
    """Return the bytes a second of ``"200MB"``, ``"1.5 GB/s"``, or a number above 0. ``what`` names the argument in the
    error."""
    rate = parse_rate(amount) or math.nan if isinstance(amount, str) else float_of(amount)
    if not 0 < rate < math.inf:
        raise ConfigError(f"{what} must be a rate such as '200MB/s', not {shown(amount)}", hint=_SIZE_UNITS)
    return rate


def bytes_of(amount: Size, what: str, least: int = 1) -> int:
    """Return the bytes of ``"500GB"``, ``"1.5 TiB"``, or a whole number. ``what`` names the argument in the error."""
    size: float = math.nan
    if isinstance(amount, str):
        parsed = parse_size(amount)
        size = math.nan if parsed is None else parsed
    elif not isinstance(amount, bool) and hasattr(amount, "__index__"):
        size = operator.index(amount)
    if not least <= size < 1 << 63:
        raise ConfigError(f"{what} must be a size such as '16GB' or '512MiB', not {shown(amount)}", hint=_SIZE_UNITS)
    return int(size)


def float_of(value: Any) -> float:
    """Return a number as a float; NaN for anything else. A bool or a text is not a number here, and a tensor is not
    read."""
    if isinstance(value, (bool, str, bytes)) or hasattr(value, "is_cuda") or not hasattr(value, "__float__"):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan
