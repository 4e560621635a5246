"""Signals: finish the step, save, end as the signal asks. SIGUSR1 only saves."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

from relight.pulse import ASKED_FOR, take_asked, teller

ENDING = (signal.SIGTERM, signal.SIGINT)
SAVING = (signal.SIGUSR1,)
ENDS = frozenset(one.name for one in ENDING)
"""Reasons behind which a job ends."""
_SAVES = frozenset(one.name for one in SAVING)
URGENT = ENDS | _SAVES
"""Reasons that are not put off."""


def is_urgent(reason: str) -> bool:
    """Whether somebody waits for that save: it is not put off, and takes no longer than it must."""
    return reason in URGENT or reason.startswith(ASKED_FOR)


def spoken(reason: str) -> str:
    """The reason as the checkpoint is to have it: of a signal that only saves, who had it sent, if ``relight run`` has said so."""
    who = take_asked(teller().path) if reason in _SAVES else ""
    return f"{ASKED_FOR}{who}" if who else reason


class Signals:
    """Handlers that only take note; ``pending`` is asked at the end of each step.

    A second SIGINT ends at once; a SIGTERM says no more than the first, as whoever ends a job and what runs it may each send one: the save
    that it asks for is not lost by that. In a forked child (a data loader's worker) the handlers do what the system would have done:
    SIGTERM ends it; SIGINT is left to the parent, which still needs its workers to finish the step.
    """

    def __init__(self, on_signal: Callable[[str], None]) -> None:
        self._on_signal = on_signal
        self._owner = os.getpid()
        self._previous: dict[int, Any] = {}
        self._handler: Callable[[int, FrameType | None], None] | None = None
        self._ending: int | None = None
        self._interrupts = 0
        self._wants_save = False

    def install(self) -> None:
        """Take over; only possible, and only done, in the main thread."""
        if self._previous or threading.current_thread() is not threading.main_thread():
            return
        self._handler = _handler(weakref.ref(self), self._previous)
        for number in (*ENDING, *SAVING):
            self._previous[number] = signal.signal(number, self._handler)

    def restore(self) -> None:
        """Give the handlers back, where they are still ours."""
        if os.getpid() != self._owner or threading.current_thread() is not threading.main_thread():
            return
        for number, previous in self._previous.items():
            if signal.getsignal(number) is self._handler:
                with contextlib.suppress(TypeError, ValueError):  # None: was not installed from Python
                    signal.signal(number, previous)
        self._previous.clear()

    @property
    def pending(self) -> str | None:
        """The name of the signal that wants a save now, or None."""
        if self._ending is not None:
            return signal.Signals(self._ending).name
        return "SIGUSR1" if self._wants_save else None

    @property
    def ending(self) -> bool:
        """Whether the process is to end after the save."""
        return self._ending is not None

    def adopt(self, name: str) -> None:
        """Act as if that signal had come: another rank has it."""
        number = signal.Signals[name]
        if number in SAVING:
            self._wants_save = True
        elif self._ending is None:
            self._ending = number

    def saved(self) -> None:
        """The wanted save was tried."""
        self._wants_save = False

    def end(self) -> None:
        """End as the signal asks: its former handler, then its default."""
        number = self._ending
        if number is None:
            return
        previous = self._previous.get(number, signal.SIG_DFL)
        self._ending = None
        self.restore()
        if previous is signal.SIG_IGN:
            return
        if callable(previous):
            previous(number, None)  # Python's own for SIGINT raises KeyboardInterrupt here
            return
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:
            if number == signal.SIGTERM:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        self._interrupts += number == signal.SIGINT
        if number in SAVING:
            self._wants_save = True
        elif number == signal.SIGINT and self._interrupts > 1:
            self.restore()
            raise KeyboardInterrupt
        else:
            self._ending = number
        self._on_signal(signal.Signals(number).name)


def _handler(owner: weakref.ref[Signals], previous: dict[int, Any]) -> Callable[[int, FrameType | None], None]:
    """A handler that does not keep a forgotten Checkpointer alive, nor swallow signals in its name: without one, the former handler's."""

    def handle(number: int, frame: FrameType | None) -> None:
        signals = owner()
        if signals is not None:
            signals._handle(number, frame)
            return
        signal.signal(number, previous.get(number) or signal.SIG_DFL)
        os.kill(os.getpid(), number)

    return handle
