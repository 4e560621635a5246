"""A parent that this run's log does not have: it was restored from a further tier or from memory."""

from __future__ import annotations

from relight.commit import Attempt
from relight.log import History
from relight.log.truncated import RESTORED_ELSEWHERE


def begun_history(attempt: Attempt, parent: str | None, rank: int) -> History:
    """Return the run's history as ``attempt`` began. If the log never had ``parent``, rank 0 notes that it is known all the same.

    Without that note, a first save that was killed before its COMMIT would look like the proof of a lost record.
    """
    history = attempt.history()
    if rank == 0 and parent is not None and parent not in history.by_id and parent not in history.retired:
        attempt.note(RESTORED_ELSEWHERE, {"checkpoint": parent})
    return history
