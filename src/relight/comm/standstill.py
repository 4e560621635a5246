"""Detect a stopped process that another process waits for. Continue it, then end it: a stopped process must not delay
training.

The processes are the agent, and the one that copies to further tiers.

A stopped process (SIGSTOP, a debugger, a suspended terminal) keeps its sockets open, so a process that waits for it
sees no error. Its state is read from /proc. A running process, however slow, is left alone: the deadlines of the waits
limit it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from time import monotonic

from relight.comm.process_state import STOPPED, ProcessIdentity, process_at
from relight.observe import emit
from relight.units import duration_text

CONTINUE_AFTER_S = 2.0
"""Seconds that a needed process may be stopped before it is continued. A suspended job is continued as a whole, within
less time."""
END_AFTER_S = 2.0
"""Seconds that it may then stay stopped, or be stopped again, before it is ended."""
CHECK_S = 1.0
"""Seconds between two checks. Each costs one small read, and only while the process is needed."""
GIVEN_UP_AFTER_S = 5.0
"""Seconds from the signal that ends the process to the end of its connection, at most."""
WRITER = ("that writes saves", "a save waits for it", "the next save has another")
COPIER = ("that copies to further tiers", "copies are due", "another one copies")
"""What a process is for, in messages: its work, what waits for it, what follows its end."""


class Standstill:
    """Checks one process. ``patience``: a factor for both times above, below 1 if the trainer itself must end soon."""

    def __init__(self, pid: int, clock: Callable[[], float] = monotonic, words: tuple[str, str, str] = WRITER) -> None:
        self._process, self._clock, self._words = process_at(pid), clock, words
        self._stopped_since: float | None = None
        self._continued_at: float | None = None
        self._ended_at: float | None = None
        self.patience: Callable[[], float] = lambda: 1.0

    @property
    def words(self) -> str:
        """The process and its state, for messages."""
        process = self._process
        return "its process is not seen" if process is None else f"process {process.pid} is {process.words}"

    def check(self, needed: bool) -> bool:
        """Check the process, and act if it is stopped and ``needed``. Return False if it was ended and its connection
        must be closed."""
        if self._process is None:
            return True
        now = self._clock()
        if self._ended_at is not None:
            return now - self._ended_at < GIVEN_UP_AFTER_S
        if not needed or self._process.state not in STOPPED:
            self._stopped_since = None
            return True
        if self._stopped_since is None:
            self._stopped_since = now
        stopped_s, patience = now - self._stopped_since, self.patience()
        if self._continued_at is None:
            if stopped_s >= CONTINUE_AFTER_S * patience:
                self._continued_at = self._stopped_since = now
                wake(self._process, stopped_s, self._words)
        elif stopped_s >= END_AFTER_S * patience:
            self._ended_at = now
            end(self._process, self._words)
        return True


def wake(process: ProcessIdentity, stopped_s: float, words: tuple[str, str, str] = WRITER) -> bool:
    """Continue a stopped process, and report it. Return whether the signal was sent."""
    how, (work, waits, _) = process.words, words
    sent = process.send(signal.SIGCONT)
    text = f"the process {work}, {process.pid}, is {how} for {duration_text(stopped_s)} while {waits}"
    emit("agent.stopped", f"{text}: it is continued" if sent else text, pid=process.pid, action="continued")
    return sent


def end(process: ProcessIdentity, words: tuple[str, str, str] = WRITER) -> None:
    """End a process that stays stopped, and report it."""
    work, _, follows = words
    text = f"the process {work}, {process.pid}, is {process.words} again or still: it is ended, and {follows}"
    emit("agent.stopped", text, pid=process.pid, action="ended")
    process.send(signal.SIGKILL)
