"""Alerts outlive whoever looks: what fired does so since then, nothing is told twice, and what cannot be read is nothing."""

from __future__ import annotations

import random

from relight.monitoring import RunSeen
from relight.monitoring.alert_delivery import Ledger
from relight.monitoring.alert_state import BYTES_MAX, decode_alarms, encode_alarms
from relight.monitoring.notify import Alarms
from relight.monitoring.rules import FIRING, PENDING, AlertRule
from relight.monitoring.settings import Alerting

RULES = (
    AlertRule("no_good_checkpoint", 60.0, "critical"),
    AlertRule("slow_save", 1.0, "warning", 100.0),
    AlertRule("risk", 0.5, "warning", 100.0),
)
SETTINGS = Alerting(rules=RULES)
BAD = RunSeen("s", "demo", good_step=3, unprotected_s=4000.0, active=True, risk=0.9)


def looked(at: float) -> tuple[Alarms, bytes]:
    """One look that finds something firing and something pending, and what was kept of it."""
    kept: list[bytes] = []
    alarms = Alarms(SETTINGS, keeps=lambda state, ledger, now: kept.append(encode_alarms(state, ledger, now)))
    alarms.update([BAD], at)
    return alarms, kept[-1]


def test_what_fires_goes_on_firing_since_it_did_and_is_told_as_resolved() -> None:
    """By one who begins an hour later: no change while it holds, one change when it is over."""
    before, data = looked(1000.0)
    state, ledger = decode_alarms(data, 4600.0)
    later = Alarms(SETTINGS, state, ledger)
    assert later.update([BAD], 4600.0).changes == ()
    assert [(one.kind, one.state, one.since) for one in later.alerts] == [
        ("no_good_checkpoint", FIRING, 1000.0), ("risk", PENDING, 4600.0),
    ]  # fmt: skip
    assert [one.state for one in later.update([BAD._replace(unprotected_s=1.0, risk=0.0)], 4615.0).changes] == ["resolved"]
    assert [one.state for one in Alarms(SETTINGS).update([BAD], 4600.0).changes] == [FIRING], "without what was kept it is told anew"
    assert [one.kind for one in before.alerts if one.state == FIRING] == ["no_good_checkpoint"]


def test_time_in_which_nobody_looked_makes_nothing_pending_older() -> None:
    """A rule that must hold for 100 s has held for 30 s, as far as anybody knows, whatever came between."""
    alarms, _ = looked(1000.0)
    alarms.update([BAD], 1030.0)
    state, ledger = decode_alarms(encode_alarms(alarms.state, alarms.ledger, 1030.0), 9030.0)
    later = Alarms(SETTINGS, state, ledger)
    assert later.update([BAD], 9090.0).changes == ()
    assert [one.kind for one in later.update([BAD], 9101.0).changes] == ["risk"]


def test_what_was_told_and_what_waits_is_kept() -> None:
    """When something was told last, whom it was escalated to, and what is still to be told."""
    alarms, _ = looked(1000.0)
    (firing,) = (one for one in alarms.alerts if one.state == FIRING)
    ledger = Ledger({firing.key: firing}, 990.0, {firing.key: 995.0}, {firing.key: 996.0})
    assert decode_alarms(encode_alarms(alarms.state, ledger, 1000.0), 1001.0)[1] == ledger


def test_what_makes_no_sense_is_nothing() -> None:
    """Another version's, cut off, changed, from the future, far too long: alerts are told anew, and nothing is raised."""
    _, data = looked(1000.0)
    nothing = ({}, Ledger())
    assert decode_alarms(data, 999.0) == nothing
    for one in (b"", b"{", b"[]", b"\xff", data[:-9], data.replace(b'"at":1000.0', b'"at":null'), b" " * (BYTES_MAX + 1)):
        assert decode_alarms(one, 2000.0) == nothing
    strange = data.replace(b"no_good_checkpoint", b"a_kind_of_tomorrow")
    state, ledger = decode_alarms(strange, 2000.0)
    assert [one.kind for one in state.values()] == ["risk"] and not ledger.told
    rng = random.Random(7)
    for _ in range(300):
        damaged = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        Alarms(SETTINGS, *decode_alarms(bytes(damaged), 2000.0)).update([BAD], 2000.0)
