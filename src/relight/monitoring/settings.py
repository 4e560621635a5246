"""``relight.toml``: the table ``[alerts]``, checked. Where alerts go is secret: it is shown by its kind alone."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from datetime import datetime, time
from pathlib import Path
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from relight.errors import ConfigError
from relight.monitoring.rules import KINDS, SEVERITIES, WARNING, AlertRule
from relight.settings.file import checked

_TARGETS_MAX = 50
_SECONDS_MAX = 30 * 86400
_WINDOW = re.compile(r"(?:([A-Z][a-z]{2}(?:,[A-Z][a-z]{2})*) )?(\d\d):(\d\d)-(\d\d):(\d\d)\Z")
_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
NUMBERS = {"group_s": 30.0, "repeat_s": 14400.0, "escalate_after_s": 1800.0}
RULE_WORDS = ("severity", "for_s", "runs", "enabled")


class MuteWindow(NamedTuple):
    """A time of the day, on some days or all, that may go past midnight; the day is that on which it begins."""

    days: tuple[int, ...]
    start: time
    end: time

    def holds(self, at: datetime) -> bool:
        """Whether ``at`` is within it."""
        now, day = at.time(), at.weekday()
        if self.start < self.end:
            return day in self.days and self.start <= now < self.end
        return (day in self.days and now >= self.start) or ((day - 1) % 7 in self.days and now < self.end)


class AlertTarget:
    """Where alerts go: an address of apprise, or better ``env:NAME`` or ``file:PATH``, where it is. Its text is secret."""

    __slots__ = ("_said",)

    def __init__(self, said: str) -> None:
        self._said = said

    def __repr__(self) -> str:
        return f"<Target {self.shown}>"

    @property
    def shown(self) -> str:
        """As people may see it: where it is said, or its kind."""
        if self._said.startswith(("env:", "file:")):
            return self._said
        scheme, found, _ = self._said.partition("://")
        return f"{scheme}://…" if found and scheme.isalnum() and len(scheme) < 20 else "…"

    def address(self) -> str:
        """The secret itself. ``ConfigError``, without it, if it is not where it is said to be."""
        kind, _, name = self._said.partition(":")
        try:
            if kind == "env":
                found = os.environ.get(name, "")
            elif kind == "file":
                with open(os.path.expanduser(name), encoding="utf-8") as file:
                    found = file.read(1 << 16)
            else:
                return self._said
        except (OSError, UnicodeDecodeError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no text"
            raise ConfigError(f"no address of alerts can be read there: {why}", where=self.shown) from None
        if not found.strip():
            raise ConfigError("no address of alerts is there", where=self.shown, hint="such as slack://…, mailto://…, json://…")
        return found.strip().splitlines()[0].strip()


@dataclass(frozen=True, slots=True)
class Alerting:
    """All of the table."""

    to: tuple[AlertTarget, ...] = ()
    escalate_to: tuple[AlertTarget, ...] = ()
    min_severity: str = WARNING
    group_s: float = NUMBERS["group_s"]
    """How long what is to be told waits for more, to go in one message."""
    repeat_s: float = NUMBERS["repeat_s"]
    """After which what still fires is told again; 0: never."""
    escalate_after_s: float = NUMBERS["escalate_after_s"]
    """After which what is critical, and still fires, is told to ``escalate_to`` too."""
    quiet: tuple[MuteWindow, ...] = ()
    """When only what is critical is told; the rest waits until it is over."""
    timezone: ZoneInfo = field(default_factory=lambda: ZoneInfo("UTC"))
    rules: tuple[AlertRule, ...] = ()

    def is_quiet(self, now: float) -> bool:
        """Whether ``now`` is a quiet time."""
        at = datetime.fromtimestamp(now, self.timezone)
        return any(window.holds(at) for window in self.quiet)


def read_alerting(path: Path | None = None) -> Alerting:
    """As variables and the file say; as usual, if neither does. ``ConfigError`` for what is no setting, with its line or variable."""
    return checked("alerts", alerting_of, path)[0]


def alerting_of(table: Any, where: str) -> Alerting:
    """The table ``[alerts]`` as settings."""
    known = {"to", "escalate_to", "min_severity", "quiet", "timezone", "rules", *NUMBERS}
    _check_names(table, known, "[alerts]", where)
    told: dict[str, Any] = {name: _seconds(table.get(name, default), f"[alerts] {name}", where) for name, default in NUMBERS.items()}
    told["to"] = _targets(table.get("to", ()), "to", where)
    told["escalate_to"] = _targets(table.get("escalate_to", ()), "escalate_to", where)
    told["min_severity"] = _severity(table.get("min_severity", WARNING), "[alerts] min_severity", where)
    windows = table.get("quiet", ())
    if not isinstance(windows, (list, tuple)) or len(windows) > _TARGETS_MAX:
        raise ConfigError('[alerts] quiet is a list of times, such as ["22:00-07:00", "Sat,Sun 00:00-23:59"]', where=where)
    told["quiet"] = tuple(_window(one, where) for one in windows)
    told["timezone"] = _zone(table.get("timezone", "UTC"), where)
    told["rules"] = tuple(_rules(table.get("rules", {}), where))
    return Alerting(**told)


def _rules(tables: Any, where: str) -> list[AlertRule]:
    _check_names(tables, set(KINDS), "[alerts.rules]", where)
    found = []
    for name, kind in KINDS.items():
        table = tables.get(name, {})
        if table is False:
            continue
        what = f"[alerts.rules.{name}]"
        _check_names(table, {*RULE_WORDS, *([kind.limit] if kind.limit else [])}, what, where)
        enabled = table.get("enabled", True)
        if not isinstance(enabled, bool):
            raise ConfigError(f"{what} enabled is true or false, not {_short(enabled)}", where=where)
        limit = table.get(kind.limit, kind.default) if kind.limit else kind.default
        if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not 0 <= limit < 1e12:
            raise ConfigError(f"{what} {kind.limit} is a number from 0 up, not {_short(limit)}", where=where)
        runs = table.get("runs", ["*"])
        if not isinstance(runs, list) or not all(isinstance(one, str) and len(one) < 500 for one in runs) or len(runs) > 1000:
            raise ConfigError(f'{what} runs is a list of patterns, such as ["prod-*"], not {_short(runs)}', where=where)
        severity = _severity(table.get("severity", kind.severity), f"{what} severity", where)
        for_s = _seconds(table.get("for_s", kind.for_s), f"{what} for_s", where)
        if enabled:
            found.append(AlertRule(name, float(limit), severity, for_s, tuple(runs)))
    return found


def _check_names(table: Any, known: set[str], what: str, where: str) -> None:
    if not isinstance(table, dict):
        raise ConfigError(f"{what} is a table", where=where)
    unknown = sorted(set(table) - known)
    if unknown:
        raise ConfigError(f"{what} has no {_short(unknown[0])}", where=where, hint=f"it has {', '.join(sorted(known))}")


def _targets(told: Any, name: str, where: str) -> tuple[AlertTarget, ...]:
    if not isinstance(told, (list, tuple)) or not all(isinstance(one, str) and one for one in told) or len(told) > _TARGETS_MAX:
        raise ConfigError(f'[alerts] {name} is a list of addresses, such as ["env:ALERTS_URL"]', where=where)
    return tuple(AlertTarget(one) for one in told)


def _seconds(value: Any, what: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _SECONDS_MAX:
        raise ConfigError(f"{what} is a number of seconds, at most 30 days, not {_short(value)}", where=where)
    return float(value)


def _severity(value: Any, what: str, where: str) -> str:
    if value not in SEVERITIES:
        raise ConfigError(f"{what} is one of {', '.join(SEVERITIES)}, not {_short(value)}", where=where)
    return str(value)


def _window(text: Any, where: str) -> MuteWindow:
    found = _WINDOW.match(text) if isinstance(text, str) else None
    days = found[1].split(",") if found and found[1] else list(_DAYS)
    if found is None or not set(days) <= set(_DAYS):
        raise ConfigError(f'{_short(text)} is no quiet time: "22:00-07:00", or "Sat,Sun 08:00-20:00"', where=where)
    try:
        start, end = time(int(found[2]), int(found[3])), time(int(found[4]), int(found[5]))
    except ValueError:
        raise ConfigError(f"{_short(text)} is no time of the day", where=where) from None
    return MuteWindow(tuple(_DAYS.index(day) for day in days), start, end)


def _zone(name: Any, where: str) -> ZoneInfo:
    try:
        if isinstance(name, str) and len(name) < 100:
            return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        pass
    raise ConfigError(f"[alerts] timezone is a name such as Europe/Berlin, not {_short(name)}", where=where)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
