"""A save that the trainer writes itself, and waits for."""

from __future__ import annotations

from collections.abc import Callable

from relight.catalog.branches import tag_if_possible
from relight.checkpointer.failure_policy import FailurePolicy, may_retry
from relight.checkpointer.retention_hook import retire
from relight.checkpointer.save_handle import Save
from relight.commit import Attempt, SaveReport
from relight.errors import ConfigError, Fenced, IncompatibleState
from relight.policy import Keep


def write_inline(save: Save, commit: Callable[[], SaveReport], policy: FailurePolicy, retries: int) -> SaveReport | None:
    """Call ``commit`` until it succeeds, at most ``1 + retries`` times. Return its report, or None if every try failed.

    ``save.error`` is the last failure, None after a success. ``Fenced``, ``IncompatibleState`` and ``ConfigError`` are
    raised at once. A fault in code (``TypeError`` and similar) is reported as ``InternalError`` and not retried: see
    ``FailurePolicy.report``.
    """
    for turn in range(1 + retries):
        try:
            report = commit()
        except (Fenced, IncompatibleState, ConfigError) as error:
            save.error = error
            raise
        except Exception as error:  # outermost level: reported and counted; the policy decides what follows
            save.error = policy.report(error, save.step, turn)
            if not may_retry(save.error):
                return None
        else:
            save.error = None
            return report
    return None


def after_inline(attempt: Attempt, checkpoint_id: str, tag: str | None, keep: Keep, verified: dict[str, bool]) -> None:
    """Tag the new checkpoint, then apply retention. ``verified`` is read and added to: which checkpoints are known to verify, by id."""
    if tag is not None:
        tag_if_possible(attempt.place.log, tag, checkpoint_id)
    retire(attempt.place, keep, verified)
    attempt.distrust(verified)
