"""The supervisor wires its parts. Each part has tests of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from relight.heartbeat import SETTING, read_risk, take_request
from relight.policy.rollback_env import SPIKES
from relight.prediction import Alarm
from relight.save_reason import preventive
from relight.settings.supervise_settings import SuperviseSettings
from relight.supervise import save_requests
from relight.supervise.supervisor import Supervisor

PARTS_MAX = 10
"""Attributes of the supervisor: what it owns itself belongs into a part."""


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Supervisor]:
    """Make a supervisor without ranks."""
    made = Supervisor(SuperviseSettings(spikes=4.0), "job", tmp_path)
    yield made
    made.close()


def alarm(action: str) -> Alarm:
    """Return an alarm that requests an action."""
    return Alarm(0.0, "ecc", action, "corrected errors rise", "so", 0.9, "rules", 0.7)


def test_the_supervisor_has_few_attributes(watched: Supervisor) -> None:
    """A new duty goes into one of the parts, or becomes a part."""
    assert len(vars(watched)) <= PARTS_MAX


def test_each_start_makes_a_new_incarnation(watched: Supervisor) -> None:
    """Its number rises, and callers that keep an old one see its ranks only."""
    first = watched.incarnation
    assert first.number == 0 and watched.poll() == ""
    environment = watched.begin([0], {"A": "1"}, "meeting")[0]
    assert environment["A"] == "1" and environment[SPIKES] == "4"
    watched.started({0: os.getpid()})
    assert (watched.incarnation.number, watched.incarnation.meeting) == (1, "meeting")
    assert watched.seen() == {} == first.pids and watched.incarnation.pids == {0: os.getpid()}
    watched.end_for_membership_change()
    assert watched.incarnation.is_over and watched.account.causes == [""]


@pytest.mark.parametrize(("drain", "leaves"), [(True, "corrected errors rise; so"), (False, "")])
def test_a_machine_leaves_only_if_it_may(
    watched: Supervisor, monkeypatch: pytest.MonkeyPatch, drain: bool, leaves: str
) -> None:
    """Ranks are warned and save in both cases."""
    page = watched.begin([0], {})[0][SETTING]
    watched.started({0: 4711})
    monkeypatch.setattr(save_requests, "has_handler", lambda pid, number: True)
    monkeypatch.setattr(os, "kill", lambda pid, number: None)
    assert watched.foresee(alarm("drain node"), drain) is bool(leaves)
    assert watched.drains == watched.announced == leaves
    watched.saves.poll()
    assert take_request(page) == preventive("corrected errors rise")
    warning = read_risk(page)
    assert warning is not None and warning.why == "corrected errors rise"


def test_a_signal_is_named_before_other_reasons(watched: Supervisor) -> None:
    """The signal ends the job, whatever else would have ended it later."""
    watched.begin([0], {})
    watched.foresee(alarm("drain node"), drain=True)
    watched.end.received("SIGTERM", is_own=False)
    assert watched.announced == "SIGTERM came"
    assert watched.ended("SIGTERM").action == "exclude_node", "the machine has left nevertheless"
