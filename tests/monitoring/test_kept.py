"""Stored alerts survive a restart: they keep their start time, are sent once, and unreadable state counts as empty."""

from __future__ import annotations

import dataclasses
import random

import pytest
from receivers import web_server

from relight.monitoring import RunSeen
from relight.monitoring.alert_delivery import Ledger, Message, Unsent
from relight.monitoring.alert_state import BYTES_MAX, decode_alarms, encode_alarms
from relight.monitoring.notify import Alarms
from relight.monitoring.rules import FIRING, PENDING, AlertRule
from relight.monitoring.settings import Alerting, alerting_of
from relight.observe import subscribe

RULES = (
    AlertRule("no_good_checkpoint", 60.0, "critical"),
    AlertRule("slow_save", 1.0, "warning", 100.0),
    AlertRule("risk", 0.5, "warning", 100.0),
)
SETTINGS = Alerting(rules=RULES)
BAD = RunSeen("s", "demo", good_step=3, unprotected_s=4000.0, active=True, risk=0.9)


def poll_once(at: float) -> tuple[Alarms, bytes]:
    """Poll once, with one alert firing and one pending. Return the alarms and their stored state."""
    kept: list[bytes] = []
    alarms = Alarms(SETTINGS, keeps=lambda state, ledger, now: kept.append(encode_alarms(state, ledger, now)))
    alarms.update([BAD], at)
    return alarms, kept[-1]


def test_a_firing_alert_keeps_its_start_and_is_reported_as_resolved() -> None:
    """After an hour another process loads the state: no change while the alert holds, one change when it is over."""
    before, data = poll_once(1000.0)
    state, ledger = decode_alarms(data, 4600.0)
    later = Alarms(SETTINGS, state, ledger)
    assert later.update([BAD], 4600.0).changes == ()
    assert [(alert.kind, alert.state, alert.since) for alert in later.alerts] == [
        ("no_good_checkpoint", FIRING, 1000.0),
        ("risk", PENDING, 4600.0),
    ]
    assert [alert.state for alert in later.update([BAD._replace(unprotected_s=1.0, risk=0.0)], 4615.0).changes] == [
        "resolved"
    ]
    assert [alert.state for alert in Alarms(SETTINGS).update([BAD], 4600.0).changes] == [FIRING], (
        "without the stored state it is reported again"
    )
    assert [alert.kind for alert in before.alerts if alert.state == FIRING] == ["no_good_checkpoint"]


def test_time_without_polls_makes_no_pending_alert_older() -> None:
    """A rule that must hold for 100 s is known to have held for 30 s, whatever came between."""
    alarms, _ = poll_once(1000.0)
    alarms.update([BAD], 1030.0)
    state, ledger = decode_alarms(encode_alarms(alarms.state, alarms.ledger, 1030.0), 9030.0)
    later = Alarms(SETTINGS, state, ledger)
    assert later.update([BAD], 9090.0).changes == ()
    assert [alert.kind for alert in later.update([BAD], 9101.0).changes] == ["risk"]


def test_sent_and_waiting_messages_are_stored() -> None:
    """The state has the last send time, the escalations, and what has not been sent."""
    alarms, _ = poll_once(1000.0)
    (firing,) = (alert for alert in alarms.alerts if alert.state == FIRING)
    ledger = Ledger({firing.key: firing}, 990.0, {firing.key: 995.0}, {firing.key: 996.0})
    assert decode_alarms(encode_alarms(alarms.state, ledger, 1000.0), 1001.0)[1] == ledger


@pytest.mark.filterwarnings("ignore:'imghdr' is deprecated:DeprecationWarning")  # apprise imports it
@pytest.mark.parametrize("role", ["to", "escalate_to"])
def test_a_message_that_was_refused_is_sent_after_a_restart(role: str) -> None:
    """A target refuses an alert, and the process ends. The next process sends the message, once. So does one that
    starts when the alert is over."""
    kept: list[bytes] = []

    def alarms(port: int) -> Alarms:
        table = {role: [f"json://127.0.0.1:{port}/"], "group_s": 0, "escalate_after_s": 0}
        settings = dataclasses.replace(alerting_of(table, ""), rules=RULES)
        state, ledger = decode_alarms(kept[-1] if kept else b"", 2000.0)
        return Alarms(
            settings, state, ledger, lambda state, ledger, now: kept.append(encode_alarms(state, ledger, now))
        )

    with web_server(status=500) as (port, refused):
        alarms(port).update([BAD], 1000.0)
    assert len(refused) == 1
    with web_server() as (port, posts):
        later = alarms(port)
        later.update([BAD], 1015.0)
        later.update([BAD], 1030.0)
        alarms(port).update([BAD], 1045.0)
        assert ["critical" in str(body) for _, body in posts] == [True]
    del kept[1:]
    with web_server() as (port, posts):
        alarms(port).update([BAD._replace(unprotected_s=1.0, risk=0.0)], 1015.0)
        assert [b'"message": "over' in body for _, body in posts] == [False, True]


def test_a_message_of_a_target_that_is_gone_is_reported() -> None:
    """The next process has fewer targets. The message is not sent elsewhere, and an event reports it."""
    settings = dataclasses.replace(alerting_of({"to": [], "group_s": 0}, ""), rules=RULES)
    message = Message("no good checkpoint", "…", "critical")
    events: list[str] = []
    undo = subscribe(lambda event: events.append(event.name) if event.name == "alert.unsent" else None)
    alarms = Alarms(settings, {}, Ledger(unsent=[Unsent(message, 0, 0)]))
    for _ in range(2):
        alarms.update([], 1010.0)
    undo()
    assert events == ["alert.unsent"]


def test_what_makes_no_sense_is_nothing() -> None:
    """State of another version, cut off, changed, from the future or too long: alerts are sent again, and nothing is
    raised."""
    _, data = poll_once(1000.0)
    nothing = ({}, Ledger())
    assert decode_alarms(data, 999.0) == nothing
    for stored in (
        b"",
        b"{",
        b"[]",
        b"\xff",
        data[:-9],
        data.replace(b'"at":1000.0', b'"at":null'),
        b" " * (BYTES_MAX + 1),
    ):
        assert decode_alarms(stored, 2000.0) == nothing
    strange = data.replace(b"no_good_checkpoint", b"a_kind_of_tomorrow")
    state, ledger = decode_alarms(strange, 2000.0)
    assert [alert.kind for alert in state.values()] == ["risk"] and not ledger.sent
    rng = random.Random(7)
    for _ in range(300):
        damaged = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        Alarms(SETTINGS, *decode_alarms(bytes(damaged), 2000.0)).update([BAD], 2000.0)
