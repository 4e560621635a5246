"""The table ``[alerts]``, with the default rule of each kind of alert."""

from __future__ import annotations

from typing import Annotated

from relight.settings import kinds
from relight.settings.kinds import SettingsTable, about

# fmt: off


class RuleSettings(SettingsTable, frozen=True):
    """A table of ``[alerts.rules]`` without a limit."""

    severity: Annotated[kinds.Severity, about("severity of the alert")] = "warning"
    for_s: Annotated[kinds.MonthSeconds, about("how long it must hold")] = 0.0
    runs: Annotated[kinds.Patterns, about("which runs it is for", "all")] = ("*",)
    enabled: Annotated[kinds.YesNo, about("whether the rule is evaluated")] = True

    @property
    def limit(self) -> tuple[str, float]:
        """Name and value of the rule's limit; an empty name if it has none."""
        own = self.__struct_fields__[len(RuleSettings.__struct_fields__) :]
        return (own[0], getattr(self, own[0])) if own else ("", 0.0)


class AfterRule(RuleSettings, frozen=True):
    """A rule that holds after a time."""

    after_s: Annotated[kinds.TimeFrom0, about("the time beyond which it holds")] = 3600.0


class CountRule(RuleSettings, frozen=True):
    """A rule that holds from a number of occurrences on."""

    count: Annotated[kinds.NumberFrom0, about("number from which it holds")] = 1.0


class AboveSecondsRule(RuleSettings, frozen=True):
    """A rule that holds above a number of seconds."""

    above_s: Annotated[kinds.TimeFrom0, about("the time beyond which it holds")] = 3600.0


class AboveRule(RuleSettings, frozen=True):
    """A rule that holds above a number."""

    above: Annotated[kinds.NumberFrom0, about("beyond which it holds")] = 0.0


class AlertRulesSettings(SettingsTable, frozen=True):
    """``[alerts.rules]``: a table for each rule. ``NAME = false`` switches it off."""

    no_good_checkpoint: AfterRule = AfterRule(severity="critical")
    saves_failing: CountRule = CountRule(count=3.0, severity="critical")
    slow_save: AboveSecondsRule = AboveSecondsRule(above_s=600.0)
    tier_full: AboveRule = AboveRule(above=0.9)
    tier_behind: AboveSecondsRule = AboveSecondsRule()
    damaged: AboveRule = AboveRule(severity="critical")
    risk: AboveRule = AboveRule(above=0.8)
    job_given_up: CountRule = CountRule(severity="critical")
    node_excluded: CountRule = CountRule()
    rolled_back: CountRule = CountRule()
    hardware_failure: CountRule = CountRule()
    crash_loop: CountRule = CountRule(count=3.0, severity="critical")
    drive_degraded: CountRule = CountRule(severity="critical")
    retention_blocked: CountRule = CountRule(count=3.0)
    unreadable: RuleSettings = RuleSettings(for_s=60.0)


class AlertSettings(SettingsTable, frozen=True):
    """``[alerts]``: where alerts are sent, and when."""

    to: Annotated[kinds.Targets, about("where alerts are sent", secret=True)] = ()
    escalate_to: Annotated[kinds.Targets, about("where alerts are sent as well if they persist", secret=True)] = ()
    min_severity: Annotated[kinds.Severity, about("the least severity that is sent")] = "warning"
    group_s: Annotated[kinds.MonthSeconds, about("how long an alert waits for others, to be sent together")] = 30.0
    repeat_s: Annotated[kinds.MonthSeconds, about("after which a firing alert is sent again; 0: never")] = 14400.0
    escalate_after_s: Annotated[kinds.MonthSeconds, about("after which a critical alert is also sent to escalate_to")] = (1800.0)
    quiet: Annotated[kinds.QuietTimes, about("when only critical alerts are sent; others wait until the end", "never")] = ()
    timezone: Annotated[kinds.Zone, about("time zone of quiet")] = "UTC"
    dashboard: Annotated[kinds.WebAddress, about("address of relight serve, to which alerts at an Alertmanager link")] = ""
    rules: AlertRulesSettings = AlertRulesSettings()


DEFAULTS = AlertSettings()


def default_rule(name: str) -> RuleSettings:
    """Return the default rule of a kind of alert."""
    rule: RuleSettings = getattr(DEFAULTS.rules, name)
    return rule


def rules_of(settings: AlertRulesSettings) -> dict[str, RuleSettings]:
    """Return the rule of each kind."""
    return {name: getattr(settings, name) for name in settings.__struct_fields__}
