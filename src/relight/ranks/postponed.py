"""Saves that are due before the agent is ready, or while no snapshot slot is free: reported once, and marked with the step at which
they were due."""

from __future__ import annotations

from relight.observe import emit
from relight.save_reason import SaveReason


def postpone(reason: SaveReason, step: int, why: str) -> SaveReason:
    """Report that the save due at ``step`` is postponed, and return the reason that the later save has. A second call changes nothing."""
    if reason.postponed:
        return reason
    message = f"step {step}: save postponed, {why}; it will be taken at the first step that can be saved, with that step's state"
    emit("save.coalesced", message, step=step)
    return reason.postponed_from(step)
