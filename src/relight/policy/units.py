"""Amounts as people write them."""

from __future__ import annotations

import math
import re
from typing import Protocol

from relight.errors import ConfigError

_AMOUNT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*\Z")
_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_BYTES = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _BYTES.update({f"{_letter}b": 1000**_power, f"{_letter}ib": 1024**_power})


class Span(Protocol):
    """A length of time, such as a ``timedelta``."""

    def total_seconds(self) -> float:
        """As a number."""


def seconds_of(amount: str | float | Span, what: str) -> float:
    """``"36h"``, ``"7d"``, ``"90m"``, a ``timedelta``, or a number of seconds. ``what`` names it in the error."""
    if isinstance(amount, str):
        parsed = _AMOUNT.match(amount)
        unit = _SECONDS.get(parsed[2].lower()) if parsed else None
        found = float(parsed[1]) * unit if parsed and unit else math.nan
    else:
        number = amount if isinstance(amount, (int, float)) else getattr(amount, "total_seconds", lambda: math.nan)()
        found = math.nan if isinstance(number, bool) else float(number)
    if not 0 < found < math.inf:
        raise ConfigError(f"{what} is a time such as '36h' or '7d', not {amount!r}", hint="units: s m h d w")
    return found


def bytes_of(amount: str | int, what: str) -> int:
    """``"500GB"``, ``"1.5 TiB"``, or a number of bytes. ``what`` names it in the error."""
    found: float = math.nan
    if isinstance(amount, str):
        parsed = _AMOUNT.match(amount)
        unit = _BYTES.get(parsed[2].lower()) if parsed else None
        found = float(parsed[1]) * unit if parsed and unit else math.nan
    elif isinstance(amount, int) and not isinstance(amount, bool):
        found = amount
    if not 1 <= found < 1 << 63:
        raise ConfigError(f"{what} is a size such as '500GB' or '2TiB', not {amount!r}")
    return int(found)


_COUNTS = {"": 1, "k": 1000, "m": 10**6, "b": 10**9, "t": 10**12}


def number_of(amount: str | int, what: str) -> int:
    """``"8B"``, ``"1.3T"``, ``"124M"``, or a whole number. ``what`` names it in the error."""
    parsed = _AMOUNT.match(str(amount)[:40])
    unit = _COUNTS.get(parsed[2].lower()) if parsed else None
    found = float(parsed[1]) * unit if parsed and unit else 0.0
    if not 1 <= found <= 1e16:
        raise ConfigError(f"{what} is a number such as '8B' or '1.3T', not {str(amount)[:40]!r}", hint="units: k M B T")
    return round(found)
