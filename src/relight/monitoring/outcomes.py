"""Summarizes the supervisors' decisions for a job's operator. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from relight.format.records import NoteBody
from relight.log import History
from relight.log.history import ROLLED_BACK
from relight.log.identity import seconds_since_epoch
from relight.supervise.decide import ACTIONS, DAY_S, FENCED
from relight.supervise.incidents import Incident

GIVEN_UP_S = 7 * DAY_S
"""Seconds after which a stopped job that was not started again counts as abandoned."""


class Outcomes(NamedTuple):
    """Facts about a run's jobs that an operator must know. Each reason is empty if there is none."""

    decision: str = ""
    """Action of the last decision, one of ``ACTIONS``; empty without an incident."""
    decided_at: float | None = None
    """When it was made, in seconds since the epoch."""
    decision_why: str = ""
    given_up: str = ""
    """Why ``relight run`` stopped, if no attempt has begun since."""
    excluded: tuple[str, ...] = ()
    """Nodes that left a job within a day, each with the reason, oldest first."""
    hardware: int = 0
    """Failures of hardware within a day."""
    hardware_why: str = ""
    roll_backs: int = 0
    """Number of rollbacks of the run within a day."""
    roll_back_why: str = ""


def outcomes_of(incidents: Sequence[Incident], history: History, began_at: float | None, now: float) -> Outcomes:
    """Return the facts at ``now``.

    ``incidents``: oldest first. ``began_at``: when the latest attempt took charge of the run.
    """
    last = incidents[-1] if incidents else None
    recent = [incident for incident in incidents if now - incident.time_s < DAY_S]
    hardware = [incident for incident in recent if incident.kind == "hardware"]
    excluded = {
        incident.host: f"{incident.host}: {incident.reason}" for incident in recent if incident.action == "exclude_node"
    }
    back = [incident for incident in recent if incident.action == "roll back"]
    notes = [
        note
        for note in history.notes
        if isinstance(note.body, NoteBody) and note.body.topic == ROLLED_BACK and _is_recent(note.time, now)
    ]
    return Outcomes(
        decision=last.action if last is not None and last.action in ACTIONS else "",
        decided_at=last.time_s if last is not None else None,
        decision_why=f"{last.kind}: {last.reason}" if last is not None else "",
        given_up=_given_up(incidents, began_at, now),
        excluded=tuple(excluded.values()),
        hardware=len(hardware), hardware_why=f"{hardware[-1].host}: {hardware[-1].why}" if hardware else "",
        roll_backs=max(len(notes), len(back)), roll_back_why=back[-1].reason if back else "",
    )  # fmt: skip


def _given_up(incidents: Sequence[Incident], began_at: float | None, now: float) -> str:
    """Return why ``relight run`` stopped the run's last job; empty if it did not, or if another attempt continues.

    An attempt that began later is a new job. An attempt that took the run over is in charge.
    """
    stops = [
        incident
        for incident in incidents
        if incident.action == "stop" and incident.kind != "fenced" and not incident.reason.startswith(FENCED)
    ]
    if not stops or (began_at is not None and began_at > stops[-1].time_s) or now - stops[-1].time_s > GIVEN_UP_S:
        return ""
    return stops[-1].reason or stops[-1].why


def _is_recent(time: str, now: float) -> bool:
    time_s = seconds_since_epoch(time)
    return time_s is not None and now - time_s < DAY_S
