"""What a restore did, how it is reported, and what the next attempt records about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from relight.capture import differences
from relight.commit import Attempt
from relight.format.step_number import step_of
from relight.format.topics import RESTORED_ELSEWHERE, RestoredElsewhereNote
from relight.log import Checkpoint, History
from relight.observe import emit
from relight.store.retry import first_contact
from relight.units import duration_text


@dataclass(slots=True)
class Resumed:
    """What a restore did. ``checkpoint`` is None if there was nothing to restore."""

    checkpoint: Checkpoint | None = None
    values: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)
    """Checkpoints of the nearest tier that could not be restored, by id, and what is wrong with each."""
    damaged_copies: dict[int, dict[str, str]] = field(default_factory=dict)
    """Damaged checkpoints of further tiers, by the tier's position: 1 is the first tier after the nearest."""
    run: str = ""
    where: str = ""
    """The store's URL."""
    skipped: list[tuple[int, str]] = field(default_factory=list)
    """Step of each checkpoint that could not be restored, and the reason in one word."""
    micro_step: int | None = None
    newest_seen: str | None = None
    skips: list[tuple[int, int]] = field(default_factory=list)
    cuts: dict[str, float] = field(default_factory=dict)
    searched: bool = False
    bytes_read: int = 0
    source: str = "store"
    seconds: float = 0.0

    @property
    def cut(self) -> float:
        """Factor for the learning rates: rollbacks after the restored checkpoint may have requested one."""
        return self.cuts.get(self.checkpoint.id if self.checkpoint is not None else "", 1.0)

    def skips_step(self, step: object) -> bool:
        """Return whether a rollback has marked the samples of ``step`` to be skipped."""
        number = step_of(step)
        return any(first <= number <= last for first, last in self.skips)

    def notice_newer(self, history: History) -> None:
        """Warn if another process has committed a checkpoint to the run since this restore read the log."""
        newest = history.live[-1].id if history.live else None
        if newest is not None and self.searched and newest != self.newest_seen:
            emit(
                "preflight.warning",
                f"another process committed checkpoint {newest} to this run after this one restored; it is superseded now",
                id=newest,
            )


def begun_history(attempt: Attempt, parent: str | None, rank: int) -> History:
    """Return the run's history at the start of ``attempt``. If the log never had ``parent``, rank 0 writes a note that
    names it.

    Without that note, a first save that was killed before its COMMIT would look like proof of a lost record.
    """
    history = first_contact(attempt.history)
    if rank == 0 and parent is not None and parent not in history.by_id and parent not in history.retired:
        attempt.note(RESTORED_ELSEWHERE.note(RestoredElsewhereNote(checkpoint=parent)))
    return history


def _skipped(result: Resumed) -> str:
    """Return the end of a restore's message: the steps of newer checkpoints, and why each was skipped."""
    return "".join(f"; skipped step {step}: {why}" for step, why in dict.fromkeys(result.skipped))


def report_restored(found: Resumed, start: int, environment: dict[str, Any], *, part: bool) -> None:
    """Emit what was restored, from where, and why training may not continue bit-exactly. ``part``: only a part of the state was."""
    assert found.checkpoint is not None
    emit(
        "restore.done",
        f"{'restored a part of' if part else 'resumed'} run {found.run!r} from step {found.checkpoint.step} "
        f"(store {found.where}, {duration_text(found.seconds)}{'' if found.source == 'store' else f', from {found.source}'}); "
        f"{'the step after it is' if part else 'continuing with step'} {start}{_skipped(found)}",
        step=found.checkpoint.step,
        id=found.checkpoint.id,
        bytes=found.bytes_read,
        seconds=round(found.seconds, 6),
        source=found.source,
        run=found.run,
        store=found.where,
        skipped=[step for step, _ in found.skipped],
    )
    different = differences(found.environment, environment)
    if different:
        emit("environment.differs", "this resume may not be bit-exact: " + "; ".join(different), differences=different)
    if found.notes:
        emit(
            "environment.differs",
            "this resume may not be bit-exact: " + "; ".join(found.notes),
            differences=found.notes,
        )
