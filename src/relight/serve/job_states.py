"""The state of a run's job: starting, running, finished, failed, given up or idle. Pure."""

from __future__ import annotations

from typing import NamedTuple

from relight.log.identity import seconds_since_epoch
from relight.monitoring.outcomes import outcomes_of
from relight.run_records.run_end import has_ended
from relight.serve.reader import RunState
from relight.supervise.incidents import once_each
from relight.units import age_text

QUIET_S = 600.0
"""Seconds without a sign of life after which a job no longer counts as running; or three times the usual time between its saves."""


class JobState(NamedTuple):
    """The state, the reason for it, when the first attempt began, and the last sign of life, as Unix times."""

    word: str
    why: str = ""
    began_at: float | None = None
    last_at: float | None = None

    @property
    def is_active(self) -> bool:
        """Whether a process of the job probably exists."""
        return self.word in ("running", "starting")


def job_state(
    state: RunState, ended_at: float | None, event_at: float | None, step_at: float | None, now: float
) -> JobState:
    """Return the state of a run's job at ``now``.

    From events of this machine's processes: ``ended_at``, when a process reported its normal end; ``event_at``, the last event;
    ``step_at``, the last reported step. Unix times, None if there is none.
    """
    history = state.history
    fences = [seconds_since_epoch(fence.time) for fence in history.fences]
    attempt_at = fences[-1] if fences else None
    began_at = fences[0] if fences else None
    saved_at = seconds_since_epoch(history.live[-1].time) if history.live else None
    incidents = once_each(list(state.recorded_incidents))
    last = incidents[-1] if incidents else None
    signs = (attempt_at, saved_at, event_at, last.time_s if last is not None else None)
    last_at = max((moment for moment in signs if moment is not None), default=None)
    given_up = outcomes_of(incidents, history, attempt_at, now).given_up
    quiet_s = max(QUIET_S, 3 * (state.gap_s or 0.0) + 60)

    def result(word: str, why: str = "") -> JobState:
        return JobState(word, why, began_at, last_at)

    if given_up:
        return result("given up", f"relight run stopped the job: {given_up}")
    if last is not None and last.time_s > max(attempt_at or 0.0, saved_at or 0.0):
        if last.action in ("stop", "end"):
            return result("given up" if last.action == "stop" else "idle", f"{last.kind}: {last.reason or last.why}")
        if now - last.time_s > quiet_s:
            return result("failed", f"{last.why}; no attempt has begun since")
        return result("starting", f"restarts after {last.kind}: {last.why}")
    if has_ended(history, ended_at):
        return result("finished", "its process reported the end")
    if last_at is None or now - last_at > quiet_s:
        return result(
            "idle", f"last sign of life {age_text(now - last_at)}" if last_at is not None else "it has not begun"
        )
    if attempt_at is not None and max(saved_at or 0.0, step_at or 0.0) < attempt_at:
        return result("starting", "the attempt has reported no step and no checkpoint yet")
    return result("running")
