"""Format numbers and times for pages: readable units, with the exact value in the tooltip of times."""

from __future__ import annotations

import math
from datetime import UTC, datetime

from markupsafe import Markup, escape

NOTHING = "–"


def size(count: float | None) -> str:
    """Format bytes in units of a thousand with three digits: 1.49 GB."""
    if count is None or not math.isfinite(count):
        return NOTHING
    amount = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(amount) < 999.5:
            return f"{amount:.0f} {unit}" if unit == "B" or abs(amount) >= 99.95 else f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:,.0f} PB" if amount >= 99.95 else f"{amount:.3g} PB"


def span(seconds: float | None) -> str:
    """Format a duration: 12 ms, 3.4 s, 4 min, 2 h 5 min, 3 days."""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    if seconds < 0:
        return f"-{span(-seconds)}"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms" if seconds >= 0.0095 or seconds == 0 else f"{seconds * 1000:.1f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min" if minutes % 60 else f"{minutes // 60} h"
    return f"{seconds / 86400:,.0f} days"


def ago(seconds: float | None) -> str:
    """Format a time as the duration since then: 4 min ago, or in 4 min."""
    if seconds is None or not math.isfinite(seconds):
        return "never"
    return "just now" if -2 < seconds < 2 else f"in {span(-seconds)}" if seconds < 0 else f"{span(seconds)} ago"


def share(value: float | None) -> str:
    """Format a fraction in per cent."""
    return NOTHING if value is None or not math.isfinite(value) else f"{value * 100:.1f} %"


def number(value: object) -> str:
    """Format an integer in groups of three digits, a float with six digits, and anything else as ``str``."""
    if isinstance(value, bool) or value is None:
        return NOTHING if value is None else str(value).lower()
    if isinstance(value, int):
        return (
            f"{value:,}".replace(",", " ")
            if abs(value) < 10**18
            else f"{float(value):.3g}"
            if abs(value) < 10**300
            else "very large"
        )
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def plural(count: int, noun: str) -> str:
    """Format a count with its noun: 1 run, 2 runs."""
    return (
        f"{number(count)} {noun}"
        if count == 1
        else f"{number(count)} {noun}{'es' if noun.endswith(('s', 'x', 'ch')) else 's'}"
    )


def when(time: float | str | None, now: float) -> Markup:
    """Format a time as how long ago it is, with the exact time as tooltip. ``time``: seconds since 1970, or ISO text."""
    moment = moment_of(time)
    if moment is None:
        return Markup(escape(time if isinstance(time, str) and time else NOTHING))  # noqa: S704 - escaped
    exact = moment.strftime("%Y-%m-%d %H:%M:%S UTC")
    return Markup('<time datetime="{}" title="{}">{}</time>').format(
        moment.isoformat(), exact, ago(now - moment.timestamp())
    )


def moment_of(time: float | str | None) -> datetime | None:
    """Parse a time as seconds since 1970 or ISO text. Return None if it is invalid."""
    try:
        if isinstance(time, str):
            parsed = datetime.fromisoformat(time.replace("Z", "+00:00"))
            return parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)
        return None if time is None else datetime.fromtimestamp(time, UTC)
    except (ValueError, OverflowError, OSError):
        return None
