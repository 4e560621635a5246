"""End of a Checkpointer by an exception: save the last step boundary, and end by the signal if the exception follows
from a signal."""

from __future__ import annotations

from typing import Protocol

from relight.checkpointer.closed import Closed
from relight.checkpointer.hook_list import Hooks
from relight.checkpointer.lost_workers import ends_by, reason_of
from relight.checkpointer.options import RunOptions
from relight.checkpointer.run_progress import RunProgress
from relight.checkpointer.save_loop import SaveLoop
from relight.checkpointer.session import RunSession
from relight.checkpointer.signals import SignalHandlers
from relight.checkpointer.state_capture import StateCapture
from relight.errors import Diverged, Fenced, ReplicasDiffer
from relight.observe import emit


class Leaving(Protocol):
    """The parts of a Checkpointer that its end needs."""

    _signals: SignalHandlers | None
    _hooks: Hooks
    _options: RunOptions
    _saves: SaveLoop
    _progress: RunProgress
    _session: RunSession
    _capture: StateCapture

    def _finish(self, closed: Closed, *, over: bool = True, ends: bool = False) -> None: ...


def leave(ckpt: Leaving, error: BaseException) -> None:
    """Save the last step boundary, unless ``error`` forbids it, and close ``ckpt``. End the process if ``error``
    follows from a signal."""
    signals = ckpt._signals
    ending = ends_by(signals, error)
    ckpt._hooks.grace.closing(ckpt._options.limits.deadline_s)
    try:
        if isinstance(error, SystemExit) or (
            isinstance(error, Exception)
            and not isinstance(error, (Diverged, Fenced, ReplicasDiffer))
            and not _handed_over(ckpt, error)
        ):
            ckpt._saves.drain(quiet=True)
            _save_boundary(ckpt, error)
    finally:
        closed = Closed.now(f"{type(error).__name__} ended its with block", ckpt._progress.step)
        # else other ranks continue after one rank's error
        over = ending or not ckpt._session.ranks.several or not isinstance(error, Exception)
        ckpt._finish(closed, over=over, ends=ending)
    if ending and signals is not None:
        signals.end()


def _handed_over(ckpt: Leaving, error: Exception) -> bool:
    """Return whether this rank saved the last step for all ranks, after another rank died."""
    if ckpt._session.attempt is None:
        return False
    boundary = ckpt._capture.boundary
    if done := ckpt._capture.handover.hand_over(
        error, boundary, ckpt._session.attempt.place, ckpt._saves.request, ckpt._progress.in_flight.saves
    ):
        ckpt._progress.saved = (boundary.step, None) if boundary.step is not None else None
    return done


def _save_boundary(ckpt: Leaving, error: BaseException) -> None:
    """Save the end of the last step, if parameters and optimizer have not changed since. ``error`` may be ``SystemExit``."""
    step = ckpt._capture.boundary.step
    if ckpt._session.attempt is None or step is None or ckpt._progress.saved == (step, None):
        return
    if ckpt._session.ranks.several:  # the others may still train, and a save needs them all
        if isinstance(error, SystemExit):
            text = (
                f"sys.exit() left the with block after step {step}, which is not saved: one of several ranks cannot save alone; "
                "leave the loop, or call save(), before sys.exit()"
            )
            emit("save.failed", text, step=step, kind="exception")
        return
    try:
        state = ckpt._capture.boundary.consistent_after(error)
        if state is not None:
            ckpt._saves.write(state, step, reason_of(ckpt._signals, error, step), ckpt._progress.metrics, None, None)
    except Exception as second:  # the caller's exception must not be hidden by this one
        emit("save.failed", f"saving after {type(error).__name__} failed: {second}", step=step, kind="exception")
