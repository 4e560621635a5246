"""``relight.toml``: the table ``[alerts]``, checked. Targets of alerts are secret: only their kind is shown."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, time
from pathlib import Path
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from relight.errors import ConfigError, shown
from relight.monitoring.rules import AlertRule
from relight.settings.alert_settings import DEFAULTS, AlertSettings, rules_of
from relight.settings.error_location import located
from relight.settings.file import checked
from relight.settings.secret_text import secret_text
from relight.settings.validation import decode

_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")


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
    """Target of alerts: an address of apprise or of an Alertmanager, or better ``env:NAME`` or ``file:PATH``, which contains it.

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
        if not self._spec.startswith(("env:", "file:")):
            return self._spec
        return secret_text(self._spec, "address for alerts", "such as slack://…, mailto://…, alertmanager://…")


@dataclass(frozen=True, slots=True)
class Alerting:
    """The settings of ``AlertSettings``, converted."""

    to: tuple[AlertTarget, ...] = ()
    escalate_to: tuple[AlertTarget, ...] = ()
    min_severity: str = DEFAULTS.min_severity
    group_s: float = DEFAULTS.group_s
    repeat_s: float = DEFAULTS.repeat_s
    escalate_after_s: float = DEFAULTS.escalate_after_s
    quiet: tuple[MuteWindow, ...] = ()
    timezone: ZoneInfo = field(default_factory=lambda: ZoneInfo("UTC"))
    dashboard: str = DEFAULTS.dashboard
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
    if isinstance(table, dict) and isinstance(table.get("rules"), dict):
        rules = {name: {"enabled": False} if rule is False else rule for name, rule in table["rules"].items()}
        table = {**table, "rules": rules}
    given = decode(table, AlertSettings, "alerts", where)
    with located({}, ("timezone",), where):
        timezone = _zone(given.timezone)
    return Alerting(
        to=tuple(map(AlertTarget, given.to)),
        escalate_to=tuple(map(AlertTarget, given.escalate_to)),
        min_severity=given.min_severity,
        group_s=given.group_s,
        repeat_s=given.repeat_s,
        escalate_after_s=given.escalate_after_s,
        quiet=tuple(map(_window, given.quiet)),
        timezone=timezone,
        dashboard=given.dashboard,
        rules=tuple(
            AlertRule.from_settings(name, rule) for name, rule in rules_of(given.rules).items() if rule.enabled
        ),
    )


def _window(text: str) -> MuteWindow:
    days, _, times = text.rpartition(" ")
    start, end = map(time.fromisoformat, times.split("-"))
    return MuteWindow(tuple(_DAYS.index(day) for day in days.split(",")) if days else tuple(range(7)), start, end)


def _zone(name: str) -> ZoneInfo:
    try:
        if len(name) < 100:
            return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        pass
    raise ConfigError(f"[alerts] timezone must be a name such as Europe/Berlin, not {shown(name)}")
