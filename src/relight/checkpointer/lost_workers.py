"""Exceptions that the end of a job causes: a signal ends data loader workers, and torch raises an error in the trainer."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
import weakref
from collections.abc import Iterator, Mapping
from types import FrameType, TracebackType
from typing import Any

from relight.checkpointer.observer import EndingSignals, ObservedCheckpointer, observers
from relight.observe import emit
from relight.save_reason import END, SaveReason, of_exception, of_signal

WAIT_S = 1.0
"""Seconds to wait for the trainer's own signal after a worker was ended by one."""
_ENDED = re.compile(r"DataLoader worker \(pid.*killed by signal: (Terminated|Hangup|Interrupt)")
_LOST = re.compile(r"DataLoader worker \(pid.*(killed by signal|exited unexpectedly)|Pin memory thread exited")
_CHAIN_MAX = 20


def ends_by(signals: EndingSignals | None, error: BaseException | None) -> bool:
    """Return whether ``error`` is only that the signal which ends this job has ended a worker of a data loader, too."""
    if signals is None or not isinstance(error, Exception):
        return False
    if _matches(error, _ENDED):
        until = time.monotonic() + WAIT_S
        while not signals.ending and time.monotonic() < until and signals.installed:
            time.sleep(0.01)  # the handler runs here: workers may get the signal of the group first
        return signals.ending
    return signals.ending and (_matches(error, _LOST) or any(_is_broken_pipe(cause) for cause in _chain(error)))


def reason_of(signals: EndingSignals | None, error: BaseException, step: int | None) -> SaveReason:
    """Return the reason of the save before ``error`` ends the process; report an error that is part of the job's ending."""
    # with a code other than None or 0, a scheduler may start the job again
    if isinstance(error, SystemExit) and not error.code:
        return END
    if signals is None or not ends_by(signals, error):
        return of_exception(error)
    after = "before the first step" if step is None else f"in the step after {step}"
    first = str(error).strip().splitlines() or [type(error).__name__]
    text = f"{signals.pending} has ended a data loader worker {after}, too ({first[0][:120]}): this is the job's ending, no failure"
    emit("signal.worker", text, signal=signals.pending or "", step=step)
    return of_signal(signals.pending) if signals.pending else of_exception(error)


def quiet_workers() -> None:
    """While the job ends, keep torch's report of a dead worker out of the step in progress.

    The next batch raises it.
    """
    former = signal.getsignal(signal.SIGCHLD)
    if callable(former) and not isinstance(former, _WorkerDeaths):
        with contextlib.suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGCHLD, _WorkerDeaths(former))


def report_workers() -> None:
    """Undo ``quiet_workers``."""
    now = signal.getsignal(signal.SIGCHLD)
    if isinstance(now, _WorkerDeaths):
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGCHLD, now.former)


class _WorkerDeaths:
    """Handler of SIGCHLD that raises a dead worker's error only where the trainer waits for data."""

    def __init__(self, former: Any) -> None:
        self.former = former

    def __call__(self, number: int, frame: FrameType | None) -> None:
        try:
            self.former(number, frame)
        except RuntimeError as error:
            if _waits_for_data(frame) or not _matches(error, _LOST):
                raise


class _Uncaught:
    """An ``Observer`` that closes the Checkpointers of a script without ``with`` when a worker's death ends the script."""

    def __init__(self) -> None:
        self._open: weakref.WeakSet[ObservedCheckpointer] = weakref.WeakSet()

    def place(self, url: str, run: str) -> tuple[str, str]:
        """Leave the place unchanged."""
        return url, run

    def on_start(self, ckpt: ObservedCheckpointer) -> None:
        """Watch for uncaught exceptions."""
        self._open.add(ckpt)
        if not isinstance(sys.excepthook, _Hook):
            sys.excepthook = _Hook(sys.excepthook, self)

    def on_restore(self, ckpt: ObservedCheckpointer, step: int, checkpoint_id: str | None) -> None:
        """Do nothing."""

    def on_step(self, ckpt: ObservedCheckpointer, step: int, metrics: Mapping[str, Any], samples: Any) -> None:
        """Do nothing."""

    def on_end(self, ckpt: ObservedCheckpointer) -> None:
        """Stop watching."""
        self._open.discard(ckpt)

    def ended(self, error: BaseException, trace: TracebackType | None) -> None:
        """Do what the end of a ``with`` block does: save the last consistent step, and end by a signal if ``error`` follows from it.

        An interactive session continues after an error, and its Checkpointer with it: only what a signal ends is ended there.
        """
        for ckpt in list(self._open):
            ends = not hasattr(sys, "ps1") or ends_by(ckpt._signals, error)
            if ckpt._closed is None and not ckpt._progress.calls.elsewhere and ends:
                try:
                    ckpt.__exit__(type(error), error, trace)
                except Exception as second:  # the traceback of the first error must still be printed
                    emit(
                        "save.failed",
                        f"ending after {type(error).__name__} failed: {second}",
                        step=ckpt._progress.step,
                        kind="exception",
                    )


class _Hook:
    """The ``sys.excepthook`` of a process with Checkpointers."""

    def __init__(self, former: Any, uncaught: _Uncaught) -> None:
        self._former, self._uncaught = former, uncaught

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            self._uncaught.ended(error, trace)  # does not return if a signal ends the process
        except KeyboardInterrupt:  # SIGINT ends it: as Python ends a process by it
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        self._former(kind, error, trace)


def _matches(error: BaseException, pattern: re.Pattern[str]) -> bool:
    return any(pattern.search(str(cause)) for cause in _chain(error))


def _is_broken_pipe(error: BaseException) -> bool:
    return isinstance(error, (EOFError, ConnectionError)) or type(error).__name__ == "BrokenProcessPool"


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and the chain of errors that caused it, newest first."""
    cause: BaseException | None = error
    for _ in range(_CHAIN_MAX):
        if cause is None:
            return
        yield cause
        cause = cause.__cause__ or cause.__context__


def _waits_for_data(frame: FrameType | None) -> bool:
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith(("torch.utils.data.", "torchdata.")):
            return True
        frame = frame.f_back
    return False


observers.append(_Uncaught())
