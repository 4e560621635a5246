"""What to do when a save fails: warn and continue, retry, or raise (``on_failure=``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from relight.comm import RankTimeout
from relight.commit.multi_rank import OthersFailed
from relight.errors import (
    ConfigError,
    InternalError,
    RelightError,
    SaveFailed,
    is_fault,
    is_refusal,
    known,
    shown,
    with_outcome,
)
from relight.observe import emit
from relight.policy.argument_checks import whole_of
from relight.policy.call_text import ShownAsCall
from relight.save_reason import SaveReason
from relight.settings.short_traceback import short_traceback


@dataclass(frozen=True, slots=True, repr=False)
class FailurePolicy(ShownAsCall):
    """Retry a failed save up to ``retries`` times. Raise after ``raise_after`` failed saves in a row; None: never.
    ``begin_again``: start a new log if the run's directory was removed."""

    _call: ClassVar[str] = "failure_policy"

    retries: int = 0
    raise_after: int | None = None
    begin_again: bool = False

    def report(self, error: Exception, step: int, turn: int, *, final: bool = False) -> RelightError:
        """Report that attempt ``turn`` of the save at ``step`` failed, and what follows. Return the error as a
        ``RelightError``. ``final``: the process ends after this save.

        A fault in code is reported as such, with its traceback, and is not retried: the same state would meet the same
        fault. It does not stop training. It counts for ``raise_after``: a caller who wants to stop without checkpoints
        has none here either.
        """
        failed = known(error, f"step {step}")
        retried = turn < self.retries and may_retry(failed)
        if retried:
            outcome = "it is tried again now"
        elif final:
            outcome = "the process ends without this checkpoint, and the next start resumes from the newest one"
        else:
            outcome = "training continues, and the next save is tried as usual"
        emit(
            "save.failed",
            f"the save at step {step} failed: {with_outcome(failed, outcome)}",
            step=step,
            kind=failed.kind,
            turn=turn,
        )
        return failed

    def again(self, reason: SaveReason, error: RelightError | None, failed_before: int) -> SaveReason | None:
        """Return ``reason`` if the save must be tried again at a later step, None if not. ``failed_before``: failed
        saves in a row so far.

        For saves that cannot be repeated at once, because their step's state is gone: saves of several ranks, and saves
        of the agent.
        """
        return (
            reason
            if error is not None and error.retryable and may_retry(error) and failed_before < self.retries
            else None
        )

    def stop_after(self, in_a_row: int, error: RelightError | None, step: int) -> None:
        """Raise ``SaveFailed`` after ``raise_after`` failed saves in a row. If the last error is a fault in Relight,
        raise that error."""
        if self.raise_after is None or in_a_row < self.raise_after:
            return
        if isinstance(error, InternalError):
            raise error
        raise SaveFailed(f"{in_a_row} saves in a row failed", where=f"step {step}") from error


def ends_a_save(error: Exception) -> bool:
    """Return whether an error during the capture ends only that save: other ranks are late or have failed, or the
    system refused memory, a descriptor or a thread. Any other error is a fault in the caller's components, and is
    raised."""
    return isinstance(error, (RankTimeout, OthersFailed)) or is_refusal(error)


def may_retry(error: RelightError) -> bool:
    """Return whether the same save may be tried again: not after a fault in code."""
    return not isinstance(error, InternalError) and not (error.__cause__ is not None and is_fault(error.__cause__))


@short_traceback
def failure_policy(*, retries: int = 0, raise_after: int | None = None, begin_again: bool = False) -> FailurePolicy:
    """Return a policy for ``Checkpointer(on_failure=…)``.

    Where the trainer writes, a failed save is tried again at once. For a save in the background, the state of the next
    step is saved instead; with several ranks, that of the next step at which a save is due.

    Args:
        retries: How often a failed save is tried again: 0 to 100.
        raise_after: The number of failed saves in a row after which to raise ``SaveFailed``. None: never.
        begin_again: If the run's directory is moved or deleted during training, begin a new log in the same place and
            save there. Without it, every later save fails with ``RunRemoved``. Only for a run of one process, and never
            over remaining checkpoints.
    """
    if not isinstance(begin_again, bool):
        raise ConfigError(f"begin_again= takes True or False, not {shown(begin_again)}")
    limit = None if raise_after is None else whole_of(raise_after, "raise_after")
    return FailurePolicy(whole_of(retries, "retries", least=0, most=100), limit, begin_again)


def check_failures(value: str | FailurePolicy) -> FailurePolicy:
    """Return the policy that ``value`` names: ``warn``, ``retry``, ``raise``, or a policy, which is returned
    unchanged."""
    named = {"warn": FailurePolicy(), "retry": FailurePolicy(retries=2), "raise": FailurePolicy(raise_after=1)}
    if isinstance(value, FailurePolicy):
        return value
    if isinstance(value, str) and value in named:
        return named[value]
    raise ConfigError(
        f"on_failure= takes 'warn', 'retry', 'raise' or relight.failure_policy(…), not {shown(value)}",
        hint="'warn' continues training, 'retry' retries twice first, 'raise' stops",
    )
