"""``relight.toml``: the table ``[alerts]``, checked. Targets of alerts are secret: only their kind is shown."""

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
    """A time window on some days or all. It may pass midnight; its day is the one on which it begins."""

    days: tuple[int, ...]
    start: time
    end: time

    def holds(self, moment: datetime) -> bool:
        """Return whether ``moment`` is within the window."""
        now, day = moment.time(), moment.weekday()
        if self.start < self.end:
            return day in self.days and self.start <= now < self.end
        return (day in self.days and now >= self.start) or ((day - 1) % 7 in self.days and now < self.end)


class AlertTarget:
    """Target of alerts: an address of apprise, or better ``env:NAME`` or ``file:PATH``, which contains it.

    Its text is secret.
    """

    __slots__ = ("_spec",)

    def __init__(self, spec: str) -> None:
        self._spec = spec

    def __repr__(self) -> str:
        return f"<Target {self.shown}>"

    @property
    def shown(self) -> str:
        """Return the target without its secret: ``env:NAME``, ``file:PATH``, or the kind of the address."""
        if self._spec.startswith(("env:", "file:")):
            return self._spec
        scheme, separator, _ = self._spec.partition("://")
        return f"{scheme}://…" if separator and scheme.isalnum() and len(scheme) < 20 else "…"

    def address(self) -> str:
        """Return the secret address.

        Raise ``ConfigError``, without the secret, if its variable or file does not contain one.
        """
        kind, _, name = self._spec.partition(":")
        try:
            if kind == "env":
                address = os.environ.get(name, "")
            elif kind == "file":
                with open(os.path.expanduser(name), encoding="utf-8") as file:
                    address = file.read(1 << 16)
            else:
                return self._spec
        except (OSError, UnicodeDecodeError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not text"
            raise ConfigError(f"an address for alerts cannot be read there: {why}", where=self.shown) from None
        if not address.strip():
            raise ConfigError(
                "there is no address for alerts", where=self.shown, hint="such as slack://…, mailto://…, json://…"
            )
        return address.strip().splitlines()[0].strip()


@dataclass(frozen=True, slots=True)
class Alerting:
    """All settings of the table."""

    to: tuple[AlertTarget, ...] = ()
    escalate_to: tuple[AlertTarget, ...] = ()
    min_severity: str = WARNING
    group_s: float = NUMBERS["group_s"]
    """Seconds that an alert waits for further ones, to be sent in one message."""
    repeat_s: float = NUMBERS["repeat_s"]
    """Seconds after which a firing alert is sent again; 0: never."""
    escalate_after_s: float = NUMBERS["escalate_after_s"]
    """Seconds after which a critical, firing alert is also sent to ``escalate_to``."""
    quiet: tuple[MuteWindow, ...] = ()
    """Windows in which only critical alerts are sent. Others wait until the window ends."""
    timezone: ZoneInfo = field(default_factory=lambda: ZoneInfo("UTC"))
    rules: tuple[AlertRule, ...] = ()

    def is_quiet(self, now: float) -> bool:
        """Return whether ``now`` (seconds since the epoch) is in a quiet window."""
        local = datetime.fromtimestamp(now, self.timezone)
        return any(window.holds(local) for window in self.quiet)


def read_alerting(path: Path | None = None) -> Alerting:
    """Return the settings from environment variables and the file, else the defaults.

    Raise ``ConfigError`` for an invalid or unknown setting, with its line or variable.
    """
    return checked("alerts", alerting_of, path)[0]


def alerting_of(table: Any, where: str) -> Alerting:
    """Return the table ``[alerts]`` as settings."""
    keys = {"to", "escalate_to", "min_severity", "quiet", "timezone", "rules", *NUMBERS}
    _check_names(table, keys, "[alerts]", where)
    values: dict[str, Any] = {
        name: _seconds(table.get(name, default), f"[alerts] {name}", where) for name, default in NUMBERS.items()
    }
    values["to"] = _targets(table.get("to", ()), "to", where)
    values["escalate_to"] = _targets(table.get("escalate_to", ()), "escalate_to", where)
    values["min_severity"] = _severity(table.get("min_severity", WARNING), "[alerts] min_severity", where)
    windows = table.get("quiet", ())
    if not isinstance(windows, (list, tuple)) or len(windows) > _TARGETS_MAX:
        raise ConfigError(
            '[alerts] quiet is a list of times, such as ["22:00-07:00", "Sat,Sun 00:00-23:59"]', where=where
        )
    values["quiet"] = tuple(_window(window, where) for window in windows)
    values["timezone"] = _zone(table.get("timezone", "UTC"), where)
    values["rules"] = tuple(_rules(table.get("rules", {}), where))
    return Alerting(**values)


def _rules(tables: Any, where: str) -> list[AlertRule]:
    _check_names(tables, set(KINDS), "[alerts.rules]", where)
    rules = []
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
        if (
            not isinstance(runs, list)
            or not all(isinstance(glob, str) and len(glob) < 500 for glob in runs)
            or len(runs) > 1000
        ):
            raise ConfigError(f'{what} runs is a list of patterns, such as ["prod-*"], not {_short(runs)}', where=where)
        severity = _severity(table.get("severity", kind.severity), f"{what} severity", where)
        for_s = _seconds(table.get("for_s", kind.for_s), f"{what} for_s", where)
        if enabled:
            rules.append(AlertRule(name, float(limit), severity, for_s, tuple(runs)))
    return rules


def _check_names(table: Any, known: set[str], what: str, where: str) -> None:
    if not isinstance(table, dict):
        raise ConfigError(f"{what} is a table", where=where)
    unknown = sorted(set(table) - known)
    if unknown:
        raise ConfigError(f"{what} has no {_short(unknown[0])}", where=where, hint=f"it has {', '.join(sorted(known))}")


def _targets(urls: Any, name: str, where: str) -> tuple[AlertTarget, ...]:
    if (
        not isinstance(urls, (list, tuple))
        or not all(isinstance(url, str) and url for url in urls)
        or len(urls) > _TARGETS_MAX
    ):
        raise ConfigError(f'[alerts] {name} is a list of addresses, such as ["env:ALERTS_URL"]', where=where)
    return tuple(AlertTarget(url) for url in urls)


def _seconds(value: Any, what: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _SECONDS_MAX:
        raise ConfigError(f"{what} is a number of seconds, at most 30 days, not {_short(value)}", where=where)
    return float(value)


def _severity(value: Any, what: str, where: str) -> str:
    if value not in SEVERITIES:
        raise ConfigError(f"{what} is one of {', '.join(SEVERITIES)}, not {_short(value)}", where=where)
    return str(value)


def _window(text: Any, where: str) -> MuteWindow:
    match = _WINDOW.match(text) if isinstance(text, str) else None
    days = match[1].split(",") if match and match[1] else list(_DAYS)
    if match is None or not set(days) <= set(_DAYS):
        raise ConfigError(f'{_short(text)} is not a quiet time: "22:00-07:00", or "Sat,Sun 08:00-20:00"', where=where)
    try:
        start, end = time(int(match[2]), int(match[3])), time(int(match[4]), int(match[5]))
    except ValueError:
        raise ConfigError(f"{_short(text)} is not a time of the day", where=where) from None
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
