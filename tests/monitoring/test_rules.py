"""Rules for alerts: when they hold, when they are sent, with which words, and invalid settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relight.errors import ConfigError
from relight.monitoring import RunSeen, SaveTimes, TierSeen
from relight.monitoring.alert_delivery import Ledger, Message, clean, line_of, plan_messages
from relight.monitoring.event_metrics import DurableSave
from relight.monitoring.outcomes import Outcomes
from relight.monitoring.overview import ROLLED_BACK_WORDS
from relight.monitoring.rules import CRITICAL, FIRING, KINDS, PENDING, RESOLVED, Alert, AlertRule, judge, usual_rules
from relight.monitoring.settings import Alerting, AlertTarget, alerting_of, read_alerting

FINE = RunSeen(
    "runs", "demo", checkpoints=3, step=300, good_step=300, age_s=60.0, good_age_s=60.0, unprotected_s=60.0,
    saving=SaveTimes(0.1, 2.0, 2.0, 3, 0, (DurableSave(0.0, 300, "a", 2.0, 0.1, 5),)), tiers=(TierSeen("hot", "u", 3, 300, 0, 0.0, 50, 100),),
)  # fmt: skip
BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "no_good_checkpoint": ({"unprotected_s": 4000.0, "good_age_s": 4000.0}, "step 300"),
    "saves_failing": ({"saving": SaveTimes(failed_in_a_row=3)}, "3 saves in a row"),
    "slow_save": ({"saving": SaveTimes(0.1, 2.0, 700.0, 3, 0, FINE.saving.last)}, "save of step 300 took"),
    "tier_full": ({"tiers": (TierSeen("hot", "u", 3, 300, 0, 0.0, 95, 100),)}, "hot is 95 % full"),
    "tier_behind": ({"tiers": (TierSeen("cold", "u", 1, 100, 2, 5000.0, 1, None),)}, "cold lacks 2 checkpoints"),
    "damaged": (
        {"damaged": 1, "bad": (("abc", "a flipped bit"), ("def", ROLLED_BACK_WORDS))},
        "abc does not count as good: a flipped bit",
    ),
    "risk": ({"risk": 0.9, "risk_why": "memory fills up"}, "0.90: memory fills up"),
    "job_given_up": (
        {"outcomes": Outcomes("stop", 400.0, given_up="an error: 3 times at step 7")},
        "stopped the job 10 min ago",
    ),
    "node_excluded": (
        {"outcomes": Outcomes(excluded=("n7: Xid 79",))},
        "1 node has left the job within a day; the last: n7: Xid 79",
    ),
    "rolled_back": (
        {"outcomes": Outcomes(roll_backs=2, roll_back_why="loss is nan")},
        "was rolled back 2 times within a day: loss is nan",
    ),
    "hardware_failure": (
        {"outcomes": Outcomes(hardware=1, hardware_why="n7: Xid 79")},
        "1 hardware failure within a day; the last: n7",
    ),
    "crash_loop": ({"recent_failures": 3}, "3 failures within an hour"),
    "drive_degraded": ({"drives": (("/nvme1", "away: EIO"),)}, "drive /nvme1 of the mirrored store is away: EIO"),
    "retention_blocked": ({"retention_failed": 3, "retention_why": "not permitted"}, "not permitted"),
    "unreadable": ({"error": "it does not answer\nmore"}, "it does not answer"),
}


def held(seen: RunSeen, now: float = 1000.0, rules: tuple[AlertRule, ...] | None = None) -> list[Alert]:
    """Return the alerts that hold for one run, without waiting."""
    rules = tuple(rule._replace(for_s=0.0) for rule in rules or usual_rules())
    return list(judge(rules, [seen], now, {}).state.values())


def test_nothing_holds_for_a_run_that_is_well() -> None:
    """A healthy run has no alert. Neither has a run that is over and has not saved for long."""
    assert held(FINE) == []
    assert held(FINE._replace(active=False, unprotected_s=1e9, good_age_s=1e9)) == []


@pytest.mark.parametrize("kind", ["saves_failing", "slow_save", "retention_blocked"])
def test_an_alert_about_saves_ends_with_the_run(kind: str) -> None:
    """Its events are kept for two weeks. The alert must not be repeated as long for a job that no longer exists."""
    assert held(FINE._replace(**BROKEN[kind][0], active=False)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_finds_its_own_and_nothing_else(kind: str) -> None:
    """Each fault is found by its own rule, with its reason. Every kind has a case."""
    change, words = BROKEN[kind]
    (alert,) = held(FINE._replace(**change))
    assert alert.kind == kind and words in alert.reason


@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind].limit])
def test_each_limit_counts(kind: str) -> None:
    """Far above, the same facts are no alert."""
    change, _ = BROKEN[kind]
    assert held(FINE._replace(**change), rules=(AlertRule(kind, 1e9, CRITICAL),)) == []


def test_a_run_without_any_checkpoint_is_an_alert() -> None:
    """There was no good checkpoint since the run began."""
    (alert,) = held(FINE._replace(good_step=None, good_age_s=None, unprotected_s=7300.0))
    assert alert.reason == "no good checkpoint since the run began, 2 h 2 min ago"


def test_a_rule_is_pending_until_it_has_held_for_long_enough() -> None:
    """An alert is pending, then firing, then resolved, once each, and keeps its start time."""
    rules, bad = (AlertRule("risk", 0.5, "warning", 60.0),), FINE._replace(risk=0.9)
    first = judge(rules, [bad], 0.0, {})
    assert [alert.state for alert in first.state.values()] == [PENDING] and first.changes == ()
    second = judge(rules, [bad], 60.0, first.state)
    assert [alert.state for alert in second.changes] == [FIRING]
    third = judge(rules, [bad], 100.0, second.state)
    assert third.changes == () and next(iter(third.state.values())).fired_at == 60.0
    (over,) = judge(rules, [FINE], 120.0, third.state).changes
    assert (over.state, over.since, over.resolved_at) == (RESOLVED, 0.0, 120.0)


def test_what_cannot_be_read_resolves_nothing() -> None:
    """An alert stays while its run or whole store cannot be read. An alert of a removed run is over."""
    rules = tuple(rule._replace(for_s=0.0) for rule in usual_rules())
    state = judge(rules, [FINE._replace(risk=0.9)], 0.0, {}).state
    away = judge(rules, [FINE._replace(error="away")], 1.0, state)
    assert {alert.kind for alert in away.state.values()} == {"risk", "unreadable"}
    store = judge(rules, [RunSeen("runs", "", error="away")], 1.0, state)
    assert {alert.kind for alert in store.state.values()} == {"risk", "unreadable"}
    gone = judge(rules, [], 1.0, state)
    assert [alert.state for alert in gone.changes] == [RESOLVED] and gone.state == {}


def test_rules_are_for_the_runs_that_they_name() -> None:
    """Patterns of names."""
    rule = AlertRule("risk", 0.5, "warning", 0.0, ("prod-*",))
    assert held(FINE._replace(risk=0.9), rules=(rule,)) == []
    assert len(held(FINE._replace(risk=0.9, run="prod-7"), rules=(rule,))) == 1


# -- sending


def alert(
    kind: str = "risk", severity: str = "warning", state: str = FIRING, run: str = "demo", at: float = 0.0
) -> Alert:
    """Return an alert."""
    return Alert(kind, severity, "runs", run, "", state, "why", at, at)


def send(
    changes: list[Alert], now: float, ledger: Ledger, settings: Alerting, state: list[Alert] | None = None
) -> tuple[list[Message], Ledger]:
    """Plan the messages of one round."""
    open_alerts = {
        alert_.key: alert_ for alert_ in (state if state is not None else changes) if alert_.state != RESOLVED
    }
    return plan_messages(changes, open_alerts, ledger, settings, now)


def test_what_comes_together_goes_in_one_message() -> None:
    """Nothing is sent before ``group_s`` has passed. Then all alerts are sent in one message, the worst first."""
    settings = Alerting(group_s=30.0)
    first, second = alert(), alert("damaged", CRITICAL)
    messages, ledger = send([first], 0.0, Ledger(), settings)
    assert messages == []
    messages, ledger = send([second], 10.0, ledger, settings, [first, second])
    assert messages == []
    (message,), ledger = send([], 30.0, ledger, settings, [first, second])
    assert message.severity == CRITICAL and "2 alerts" in message.title
    assert message.body.splitlines()[0].startswith("critical: a checkpoint is damaged")
    assert send([], 60.0, ledger, settings, [first, second])[0] == []


def test_what_came_and_went_before_it_was_sent_is_not_sent() -> None:
    """An alert that is resolved before it was sent sends nothing. One that is resolved later is sent as over."""
    settings = Alerting(group_s=30.0)
    _, ledger = send([alert()], 0.0, Ledger(), settings)
    messages, ledger = send([alert(state=RESOLVED)], 10.0, ledger, settings, [])
    assert send([], 100.0, ledger, settings, [])[0] == []
    (message,), ledger = send([alert()], 0.0, Ledger(), Alerting(group_s=0.0))
    (over,), _ = send([alert(state=RESOLVED)], 10.0, ledger, Alerting(group_s=0.0), [])
    assert over.resolved and "over" in over.title and not message.resolved


def test_in_quiet_times_only_critical_alerts_are_sent() -> None:
    """The rest waits until they are over, and is sent then if it still holds."""
    settings = alerting_of({"quiet": ["22:00-07:00"], "group_s": 0, "repeat_s": 0, "timezone": "UTC"}, "")
    night, morning = 86400 * 10 + 23 * 3600.0, 86400 * 11 + 7 * 3600.0
    warns, breaks = alert(at=night), alert("damaged", CRITICAL, at=night)
    (message,), ledger = send([warns, breaks], night, Ledger(), settings)
    assert "damaged" in message.body and "is predicted" not in message.body
    (message,), _ = send([], morning, ledger, settings, [warns, breaks])
    assert "is predicted" in message.body and "damaged" not in message.body


def test_quiet_days_and_times_past_midnight() -> None:
    """The day is that on which the time begins."""
    settings = alerting_of({"quiet": ["Fri,Sat 22:00-06:00"]}, "")
    monday = 4 * 86400.0  # 5 January 1970
    friday = monday + 4 * 86400
    assert settings.is_quiet(friday + 23 * 3600) and settings.is_quiet(friday + 29 * 3600)
    assert not settings.is_quiet(friday + 3 * 3600) and not settings.is_quiet(monday + 23 * 3600)


def test_what_still_holds_is_sent_again() -> None:
    """An alert is repeated after the set time, and not before."""
    settings = Alerting(group_s=0.0, repeat_s=100.0)
    _, ledger = send([alert()], 0.0, Ledger(), settings)
    assert send([], 99.0, ledger, settings, [alert()])[0] == []
    (message,), ledger = send([], 100.0, ledger, settings, [alert()])
    assert not message.escalated
    assert send([], 150.0, ledger, settings, [alert()])[0] == []


def test_what_is_critical_and_stays_so_is_escalated_once() -> None:
    """After the set time a critical alert goes once to further targets, which are also notified when it is over. A
    warning does not."""
    settings = Alerting(group_s=0.0, escalate_after_s=100.0, escalate_to=(AlertTarget("env:X"),), repeat_s=0.0)
    bad = alert("damaged", CRITICAL)
    _, ledger = send([bad, alert()], 0.0, Ledger(), settings)
    messages, ledger = send([], 100.0, ledger, settings, [bad, alert()])
    assert [message.escalated for message in messages] == [True] and "is predicted" not in messages[0].body
    assert send([], 200.0, ledger, settings, [bad, alert()])[0] == []
    messages, _ = send([bad._replace(state=RESOLVED)], 300.0, ledger, settings, [])
    assert sorted(message.escalated for message in messages) == [False, True]


def test_less_than_the_least_severity_is_not_sent() -> None:
    """``min_severity`` is the least severity that is sent."""
    assert send([alert(severity="info")], 0.0, Ledger(), Alerting(group_s=0.0))[0] == []
    assert len(send([alert(severity="info")], 0.0, Ledger(), Alerting(group_s=0.0, min_severity="info"))[0]) == 1


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("s3://AKIA:hunter2@bucket/run is away", "hunter2"), ("https://host/x?sig=hunter2&y=1 is away", "hunter2"),
        ("password=hunter2", "hunter2"), ("API_KEY: hunter2", "hunter2"), ("x-amz-signature=hunter2", "hunter2"),
        ("AWS_SECRET_ACCESS_KEY=hunter2 there", "hunter2"), ("mailto://me:hunter2@mail.example", "hunter2"), ("\x1b[31mred", "\x1b"),
    ],
)  # fmt: skip
def test_what_may_be_secret_is_taken_out(text: str, secret: str) -> None:
    """Secrets are removed from reasons, titles and lines."""
    assert secret not in clean(text)
    assert secret not in line_of(alert()._replace(reason=text))
    message = send([alert()._replace(reason=text, run=text)], 0.0, Ledger(), Alerting(group_s=0.0))[0][0]
    assert secret not in message.title + message.body


# -- settings


def test_settings_as_the_file_has_them(tmp_path: Path) -> None:
    """Each setting of the table arrives. Others have their defaults, and other tables are ignored."""
    path = tmp_path / "relight.toml"
    path.write_text(
        '[supervise]\nspares = true\n[alerts]\nto = ["env:HERE"]\ngroup_s = 5\nquiet = ["Sat,Sun 00:00-23:59"]\n'
        '[alerts.rules.slow_save]\nabove_s = 12\nseverity = "critical"\nruns = ["a*"]\nfor_s = 3\n[alerts.rules.risk]\nenabled = false\n'
    )
    alerting = read_alerting(path)
    rules = {rule.kind: rule for rule in alerting.rules}
    assert (alerting.group_s, [target.shown for target in alerting.to]) == (5.0, ["env:HERE"])
    assert rules["slow_save"] == AlertRule("slow_save", 12.0, "critical", 3.0, ("a*",))
    assert "risk" not in rules and rules["tier_full"].limit == KINDS["tier_full"].usual.limit[1]


@pytest.mark.parametrize(
    "table",
    [
        1, [], {"nothing": 1}, {"to": "slack://x"}, {"to": [1]}, {"to": [""]}, {"to": ["x"] * 51}, {"group_s": -1}, {"group_s": True},
        {"group_s": "1"}, {"repeat_s": 1e99}, {"min_severity": "loud"}, {"quiet": "22:00-07:00"}, {"quiet": ["22-7"]}, {"quiet": ["25:00-07:00"]},
        {"quiet": ["Foo 22:00-07:00"]}, {"timezone": "Moon/Sea"}, {"timezone": "../../etc/passwd"}, {"timezone": 3}, {"rules": 1},
        {"rules": {"loud": {}}}, {"rules": {"risk": {"below": 1}}}, {"rules": {"risk": {"above": "x"}}}, {"rules": {"risk": {"above": -1}}},
        {"rules": {"risk": {"severity": 3}}}, {"rules": {"risk": {"runs": "x"}}}, {"rules": {"risk": {"enabled": 0}}},
        {"rules": {"unreadable": {"above": 1}}}, {"rules": {"risk": 3}},
    ],
    ids=str,
)  # fmt: skip
def test_invalid_settings_are_reported(table: Any) -> None:
    """A ConfigError that names the file."""
    with pytest.raises(ConfigError) as caught:
        alerting_of(table, "here.toml")
    assert caught.value.where == "here.toml"


def test_an_address_is_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An address is shown by its kind or source. It is read from a variable or a file, and its absence is reported
    without it."""
    assert repr(AlertTarget("slack://token/a/b")) == "<Target slack://…>"
    assert "hunter2" not in repr(AlertTarget("hunter2"))
    monkeypatch.setenv("WHERE_TO", "json://x")
    (tmp_path / "secret").write_text("json://y\nmore\n")
    assert AlertTarget("env:WHERE_TO").address() == "json://x"
    assert AlertTarget(f"file:{tmp_path}/secret").address() == "json://y"
    for source in ("env:NOT_THERE", f"file:{tmp_path}/none", f"file:{tmp_path}"):
        with pytest.raises(ConfigError):
            AlertTarget(source).address()


def test_a_file_that_is_not_toml_is_reported_without_its_text(tmp_path: Path) -> None:
    """The error has the place in the file, not the text: it could be a secret."""
    path = tmp_path / "relight.toml"
    path.write_text('[alerts]\nto = ["slack://hunter2]\n')
    with pytest.raises(ConfigError) as caught:
        read_alerting(path)
    assert "hunter2" not in str(caught.value) + repr(caught.value)
