"""Begin a new log if a run's directory was removed during training, and the failure policy allows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from relight.checkpointer.background import Background
from relight.checkpointer.hook_list import Hooks
from relight.checkpointer.options import RunOptions
from relight.checkpointer.run_progress import RunProgress
from relight.checkpointer.save_handle import Save
from relight.checkpointer.save_writer import SaveWriter
from relight.checkpointer.session import RunSession
from relight.commit import Attempt
from relight.errors import RelightError, RunRemoved
from relight.observe import emit
from relight.save_reason import ASKED, END, SaveReason


class RestartableLoop(Protocol):
    """The parts of a ``SaveLoop`` that a new log needs."""

    options: RunOptions
    session: RunSession
    hooks: Hooks
    progress: RunProgress
    writer: SaveWriter | None

    def begin_attempt(self) -> Attempt:
        """See ``SaveLoop``."""

    def open_writer(self) -> SaveWriter | None:
        """See ``SaveLoop``."""

    def save(
        self,
        step: int,
        reason: SaveReason,
        metrics: Mapping[str, Any],
        tag: str | None,
        micro_step: int | None,
        *,
        may_wait: bool,
    ) -> Save | None:
        """See ``SaveLoop``."""


class NewLog:
    """Begins new logs for one Checkpointer."""

    def __init__(self) -> None:
        self._begun_after = -1
        """The last step before a new log was begun: saves up to it went to the old run."""
        self._reported = False
        """Whether the failure to begin a new log was reported."""

    def begin_if_removed(self, loop: RestartableLoop, failed: Save) -> None:
        """Take charge of a new, empty run in the same place if ``failed`` shows that the old one was removed. The next step is then saved.

        Does nothing unless the failure policy asks for it, and nothing where several ranks save together: they would have to agree.
        """
        session, progress = loop.session, loop.progress
        if (
            not isinstance(failed.error, RunRemoved)
            or not loop.options.policy.begin_again
            or session.ranks.several
            or session.attempt is None
        ):
            return
        if failed.step <= self._begun_after:  # begun before the new log was
            return
        former, parent = session.attempt, progress.parent
        writer, loop.writer = loop.writer, None
        if writer is not None:
            writer.close(polite=False)
        session.takeover.release()
        session.attempt = progress.parent = None
        try:
            loop.begin_attempt()
        except RelightError as second:
            session.attempt, progress.parent = former, parent
            if not self._reported:
                self._reported = True
                emit(
                    "save.failed", f"a new log could not be begun: {second}", step=progress.step or 0, kind=second.kind
                )
            return
        self._begun_after = progress.step if progress.step is not None else failed.step
        if isinstance(writer, Background) and isinstance(new_writer := loop.open_writer(), Background):
            new_writer.number_from(writer)
        text = f"{session.location} was removed: a new log is begun there; the older checkpoints are gone"
        emit("run.renewed", text, run=session.run, store=session.store.url)
        if loop.hooks.grace.is_closing and progress.step is not None:  # no later step will save it
            loop.save(progress.step, END, progress.metrics, None, progress.micro_step, may_wait=True)
        else:
            progress.due = ASKED
