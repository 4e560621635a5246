"""Start a thread within a bound: ``Thread.start`` alone waits for good if the new thread dies before its first line.

The system may start a thread and then refuse the memory of its first frame. CPython prints "Exception ignored in thread started by", and
``Thread.start`` waits for an event that is never set (CPython issue 140746). A training thread would stand still there.
"""

from __future__ import annotations

import threading

from relight.units import duration_text

REFUSED = "can't start new thread"
START_S = 5.0
"""Seconds that a new thread may take to its first line.

A thread that begins later finds its start aborted, and ends.
"""
_LATER_S = 1.0
"""That limit after one start of this process was aborted: memory is short, and every further start would wait."""
_given_up = threading.Event()


class _Started(threading.Event):
    """The event that ``Thread.start`` waits for, with a bound for the wait that has none."""

    def __init__(self, claim: threading.Lock) -> None:
        super().__init__()
        self._claim = claim

    def wait(self, timeout: float | None = None) -> bool:
        bound = (_LATER_S if _given_up.is_set() else START_S) if timeout is None else timeout
        if super().wait(bound) or timeout is not None:
            return self.is_set()
        if not self._claim.acquire(blocking=False):
            return True  # it began at this very moment
        _given_up.set()
        raise RuntimeError(f"{REFUSED}: it did not begin within {duration_text(bound)}")


def start_thread(thread: threading.Thread) -> None:
    """Start ``thread``. ``RuntimeError`` ("can't start new thread") if the system refuses it, or if it does not begin within the bound."""
    claim, run = threading.Lock(), thread.run

    def run_once() -> None:
        if claim.acquire(blocking=False):
            run()

    thread.run = run_once  # type: ignore[method-assign]
    thread._started = _Started(claim)  # type: ignore[attr-defined]
    thread.start()
