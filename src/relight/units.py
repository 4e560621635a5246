"""Sizes, durations, rates, counts, ages and percentages as text for people, and parsers of such text. Pure.

Numbers have three significant digits without trailing zeros: ``1.5 GB``, ``12.3 ms``. A value that rounds to 1,000 of a unit is shown as 1
of the next unit. Sizes have decimal units (1 kB is 1,000 B), as disks, networks and object stores have. Durations from a minute on have two
units: ``1 h 30 min``. None and NaN are shown as ``–``. JSON, fields of events and metrics have raw numbers instead.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias


class HasTotalSeconds(Protocol):
    """A length of time, such as a ``timedelta``."""

    def total_seconds(self) -> float:
        """Return the seconds."""


Duration: TypeAlias = str | float | HasTotalSeconds
"""A time as callers pass it: ``"30s"``, ``"10m"``, ``"2h"``, ``"7d"``, ``"1 h 30 min"``, a ``timedelta``, or seconds."""
Size: TypeAlias = str | int
"""A size as callers pass it: ``"16GB"`` (decimal), ``"512MiB"`` (binary), or bytes."""
Rate: TypeAlias = str | float
"""A rate as callers pass it: ``"200MB"`` or ``"200MB/s"``, or bytes a second."""
UNKNOWN = "–"
"""Text of None and of NaN."""

_SIZES = ("B", "kB", "MB", "GB", "TB", "PB", "EB")
_SHORT = (("ns", 1e-9), ("µs", 1e-6), ("ms", 1e-3))
_DAYS_ALONE = 100
"""Days from which hours are left out."""
_DAYS_WRITTEN_OUT = 10**6
_COUNT_WRITTEN_OUT = 10**18

_AMOUNT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-zµ]*)\s*")
_SECONDS = {
    "ns": 1e-9, "µs": 1e-6, "us": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 7 * 86400
}  # fmt: skip
_BYTES = {"": 1, "b": 1} | {
    f"{letter}{middle}{end}": base**power
    for power, letter in enumerate("kmgtpe", start=1)
    for middle, base in (("", 1000), ("i", 1024))
    for end in ("", "b")
}
_COUNTS = {"": 1, "k": 1000, "m": 10**6, "b": 10**9, "t": 10**12}


def value_text(value: object) -> str:
    """Return a metric or statistic as text, with at most six digits.

    >>> value_text(0.123456789), value_text(12_000)
    ('0.123457', '12000')
    """
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def metrics_text(metrics: Mapping[str, object]) -> str:
    """Return metrics as text.

    >>> metrics_text({"loss": 1.5, "epoch": 2})
    'loss=1.5 epoch=2'
    """
    return " ".join(f"{name}={value_text(value)}" for name, value in metrics.items())


def size_text(count: float | None) -> str:
    """Return a number of bytes as text.

    >>> size_text(999), size_text(1500), size_text(13_160_000_000_000), size_text(999_960)
    ('999 B', '1.5 kB', '13.2 TB', '1 MB')
    """
    return _signed(count, lambda amount: _scaled(amount, _SIZES))


def rate_text(bytes_per_s: float | None) -> str:
    """Return bytes per second as text.

    >>> rate_text(1.234e9), rate_text(0)
    ('1.23 GB/s', '0 B/s')
    """
    text = size_text(bytes_per_s)
    return text if text == UNKNOWN else f"{text}/s"


def duration_text(seconds: float | None) -> str:
    """Return a duration as text.

    >>> duration_text(0.0123), duration_text(5.678), duration_text(90), duration_text(5400), duration_text(2 * 86400 + 3 * 3600)
    ('12.3 ms', '5.68 s', '1 min 30 s', '1 h 30 min', '2 d 3 h')
    """
    return _signed(seconds, _duration)


def age_text(seconds: float | None) -> str:
    """Return the age of something as text, to the second below a minute and else to the minute.

    >>> age_text(1), age_text(34), age_text(754), age_text(5400), age_text(-60), age_text(None)
    ('just now', '34 s ago', '13 min ago', '1 h 30 min ago', 'in 1 min', 'never')
    """
    if seconds is None or not math.isfinite(seconds):
        return "never"
    amount = abs(seconds)
    if amount < 2:
        return "just now"
    step = 1 if amount < 59.5 else 60
    text = duration_text(round(amount / step) * step)
    return f"{text} ago" if seconds > 0 else f"in {text}"


def percent_text(share: float | None, decimals: int | None = None) -> str:
    """Return a fraction as per cent, with three significant digits or a fixed number of ``decimals``.

    >>> percent_text(0.85), percent_text(0.00123), percent_text(0.98765), percent_text(0.98765, 2)
    ('85 %', '0.123 %', '98.8 %', '98.77 %')
    """
    return _signed(
        share, lambda amount: f"{_three(100 * amount) if decimals is None else f'{100 * amount:.{decimals}f}'} %"
    )


def count_text(number: float | None, noun: str = "") -> str:
    """Return a count in groups of three digits, with the noun in its number.

    >>> count_text(1234567), count_text(1, "copy"), count_text(2, "copy"), count_text(0, "branch")
    ('1,234,567', '1 copy', '2 copies', '0 branches')
    """
    text = _count(number)
    return f"{text} {noun if number == 1 else plural(noun)}" if noun else text


def plural(noun: str) -> str:
    """Return the plural of an English noun that is formed with an s."""
    if noun.endswith("y") and noun[-2:-1] not in "aeiou":
        return f"{noun[:-1]}ies"
    return f"{noun}es" if noun.endswith(("s", "x", "ch", "sh")) else f"{noun}s"


def compact_text(value: float) -> str:
    """Return a number without a unit as short text for the axis of a chart, with four significant digits.

    >>> compact_text(12_000), compact_text(0.25), compact_text(-3.5e9)
    ('12k', '0.25', '-3.5G')
    """
    for letter, least in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= least:
            return f"{value / least:.4g}{letter}"
    return f"{value:.4g}"


def parse_size(text: str) -> float | None:
    """Return the bytes of ``500GB``, ``1.5 TiB``, ``2G`` or ``4096``, in any case; None for other text."""
    return _parsed(text, _BYTES)


def parse_rate(text: str) -> float | None:
    """Return the bytes a second of ``200MB``, ``200 MB/s`` or ``4096``; None for other text."""
    return parse_size(text.strip().removesuffix("/s"))


def parse_duration(text: str) -> float | None:
    """Return the seconds of ``36h``, ``15 min``, ``250ms`` or ``1 h 30 min``, in any case; None for other text.

    >>> parse_duration("90m"), parse_duration("1 h 30 min"), parse_duration("90")
    (5400.0, 5400.0, None)
    """
    total, end = 0.0, 0
    while part := _AMOUNT.match(text, end):
        length = _SECONDS.get(part[2].lower())
        if length is None:
            return None
        total, end = total + float(part[1]) * length, part.end()
    return total if 0 < end == len(text) else None


def parse_count(text: str) -> float | None:
    """Return the number of ``8B``, ``1.3T``, ``124M`` or ``1000``, in any case; None for other text."""
    return _parsed(text, _COUNTS)


def _parsed(text: str, units: dict[str, int]) -> float | None:
    part = _AMOUNT.fullmatch(text)
    unit = units.get(part[2].lower()) if part else None
    return float(part[1]) * unit if part and unit else None


def _signed(value: float | None, text_of: Callable[[float], str]) -> str:
    """Return the text of the value's amount after its sign. Any int or float is accepted."""
    if value is None or value != value:
        return UNKNOWN
    try:
        amount = abs(float(value))
    except OverflowError:  # an int of more than 308 digits
        amount = math.inf
    text = text_of(amount) if amount < math.inf else "∞"
    return f"-{text}" if value < 0 and not re.match(r"0[. ]*0*[ %]", text) else text


def _scaled(amount: float, units: tuple[str, ...]) -> str:
    for unit in units[:-1]:
        if amount < 999.5:
            return f"{_three(amount)} {unit}"
        amount /= 1000
    return f"{_three(amount)} {units[-1]}"


def _three(amount: float) -> str:
    return f"{amount if amount >= 1 else round(amount, 3):.3g}"


def _duration(seconds: float) -> str:
    if seconds < 0.5e-12:
        return "0 s"
    for unit, length in _SHORT:
        if seconds / length < 999.5:
            return f"{_three(seconds / length)} {unit}"
    if seconds < 59.95:
        return f"{_three(seconds)} s"
    if (total := round(seconds)) < 3600:
        return _two_units(total, "min", "s", 60)
    if (total := round(seconds / 60)) < 24 * 60:
        return _two_units(total, "h", "min", 60)
    if (total := round(seconds / 3600)) < _DAYS_ALONE * 24:
        return _two_units(total, "d", "h", 24)
    days = seconds / 86400
    return f"{round(days):,} d" if days < _DAYS_WRITTEN_OUT else f"{days:.3g} d"


def _two_units(total: int, large: str, small: str, times: int) -> str:
    many, rest = divmod(total, times)
    return f"{many} {large} {rest} {small}" if rest else f"{many} {large}"


def _count(number: float | None) -> str:
    if number is None or number != number:
        return UNKNOWN
    if abs(number) == math.inf:
        return "∞" if number > 0 else "-∞"
    if abs(number) < _COUNT_WRITTEN_OUT:
        return f"{round(number):,}"
    exponent = math.floor(math.log10(abs(number)))  # of an int of any length
    return f"{'-' if number < 0 else ''}{abs(number) // 10 ** (exponent - 2) / 100:.3g}e+{exponent}"
