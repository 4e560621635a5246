"""What to do when a save fails: warn and go on, retry, or raise, as ``on_failure=`` says."""

from __future__ import annotations

import errno
from dataclasses import dataclass

from relight.comm import RankTimeout
from relight.errors import ConfigError, InternalError, RelightError, SaveFailed, is_fault, known, shown
from relight.observe import emit
from relight.policy.units import whole_of

_REFUSALS = frozenset((errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOBUFS, errno.ENOSPC))
_REFUSED_WORDS = ("can't allocate memory", "out of memory", "can't start new thread")
"""Of torch's allocators, and of Python's threads."""


@dataclass(frozen=True, slots=True)
class FailurePolicy:
    """Try a failed save ``retries`` times more; after ``raise_after`` failed saves in a row raise, None for never. ``begin_again``: begin a
    new log if the run's directory was removed."""

    retries: int = 0
    raise_after: int | None = None
    begin_again: bool = False

    def report(self, error: Exception, step: int, turn: int) -> RelightError:
        """Report that the save at ``step`` failed at try ``turn``, and what follows. Return the error as one of ours.

        A fault in code is named as such, with its traceback, and has no retry: the same state would meet the same fault. It does not stop
        training, which is not at fault and may end well. It counts for ``raise_after``: a caller who asked to stop without checkpoints
        has none here either.
        """
        failed = known(error, f"step {step}")
        retried = turn < self.retries and may_retry(failed)
        ahead = "trying again" if retried else "training continues; the next save will be tried as usual"
        emit("save.failed", f"the save at step {step} failed: {failed}\n  {ahead}", step=step, kind=failed.kind, turn=turn)
        return failed

    def again(self, reason: str, error: RelightError | None, failed_before: int) -> str | None:
        """Return ``reason`` if the save must be tried again at a later step, None if not. ``failed_before``: failed saves in a row so far.

        For saves that cannot be repeated at once: those of several ranks, and those of the agent, which have their step's state no more.
        """
        return reason if error is not None and error.retryable and may_retry(error) and failed_before < self.retries else None

    def stop_after(self, in_a_row: int, error: RelightError | None, step: int) -> None:
        """Raise if so many failed saves in a row are too many. A fault of Relight's own is raised itself, under its own name."""
        if self.raise_after is None or in_a_row < self.raise_after:
            return
        if isinstance(error, InternalError):
            raise error
        raise SaveFailed(f"{in_a_row} saves in a row failed", where=f"step {step}") from error


def ends_a_save(error: Exception) -> bool:
    """Whether an error while the state is captured ends that save alone: other ranks are late, or the system refused memory, a
    descriptor, a thread. Anything else is a fault in the caller's components, and raised."""
    if isinstance(error, (RankTimeout, MemoryError)):
        return True
    if isinstance(error, OSError):
        return error.errno in _REFUSALS
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _REFUSED_WORDS)


def may_retry(error: RelightError) -> bool:
    """Whether the same save may be tried again: not after a fault in code."""
    return not isinstance(error, InternalError) and not (error.__cause__ is not None and is_fault(error.__cause__))


def failure_policy(*, retries: int = 0, raise_after: int | None = None, begin_again: bool = False) -> FailurePolicy:
    """The policy for ``Checkpointer(on_failure=…)``: how often to try again at once, and after how many failed saves in a row to raise.

    ``begin_again=True``: if the run's directory is moved or deleted while it is trained, begin a new log in the same place and save there.
    Only where one process saves.
    """
    if not isinstance(begin_again, bool):
        raise ConfigError(f"begin_again= takes True or False, not {shown(begin_again)}")
    most = None if raise_after is None else whole_of(raise_after, "raise_after")
    return FailurePolicy(whole_of(retries, "retries", least=0, most=100), most, begin_again)


def check_failures(value: str | FailurePolicy) -> FailurePolicy:
    """``warn``, ``retry``, ``raise`` or a policy as a policy."""
    named = {"warn": FailurePolicy(), "retry": FailurePolicy(retries=2), "raise": FailurePolicy(raise_after=1)}
    if isinstance(value, FailurePolicy):
        return value
    if isinstance(value, str) and value in named:
        return named[value]
    raise ConfigError(
        f"on_failure= takes 'warn', 'retry', 'raise' or relight.failure_policy(…), not {shown(value)}",
        hint="'warn' goes on training, 'retry' tries twice more first, 'raise' stops",
    )
