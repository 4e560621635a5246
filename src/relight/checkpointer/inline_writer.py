"""A save that the trainer writes itself, and waits for."""

from __future__ import annotations

from collections.abc import Callable

from relight.checkpointer.failure_policy import FailurePolicy, may_retry
from relight.checkpointer.save_handle import Save
from relight.commit import SaveReport
from relight.errors import ConfigError, Fenced, IncompatibleState


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
