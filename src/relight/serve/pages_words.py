"""Format numbers and times for pages, with the exact value in the tooltip of times."""

from __future__ import annotations

from datetime import UTC, datetime

from markupsafe import Markup, escape

from relight.units import UNKNOWN, age_text, count_text


def number(value: object) -> str:
    """Format an integer in groups of three digits, a float with six digits, and anything else as ``str``."""
    if isinstance(value, bool) or value is None:
        return UNKNOWN if value is None else str(value).lower()
    if isinstance(value, int):
        return count_text(value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def when(time: float | str | None, now: float) -> Markup:
    """Format a time as how long ago it is, with the exact time as tooltip. ``time``: seconds since 1970, or ISO text."""
    moment = moment_of(time)
    if moment is None:
        return Markup(escape(time if isinstance(time, str) and time else UNKNOWN))  # noqa: S704 - escaped
    exact = moment.strftime("%Y-%m-%d %H:%M:%S UTC")
    return Markup('<time datetime="{}" title="{}">{}</time>').format(
        moment.isoformat(), exact, age_text(now - moment.timestamp())
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


SHAPES = {
    "good": "good", "damaged": "failed", "suspect": "late", "rolled back": "idle",
    "running": "good", "starting": "late", "finished": "idle", "idle": "idle", "failed": "failed", "given up": "failed",
}  # fmt: skip
"""Kind of status, which has a shape and a colour, for each state of a checkpoint or a job."""


def shape_of(state: str) -> str:
    """Return the kind of status of a state."""
    return SHAPES.get(state, "other")
