"""Signals: finish the step, save, end as the signal asks. SIGUSR1 only saves."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

from relight.checkpointer import workers
from relight.checkpointer.lost_workers import quiet_workers, report_workers
from relight.heartbeat import ASKED_FOR, FORESEEN, heartbeat, take_request
from relight.observe import emit

ENDING = workers.ENDING
SAVING = (signal.SIGUSR1,)
ENDS = frozenset(one.name for one in ENDING)
"""Reasons behind which a job ends."""
_SAVES = frozenset(one.name for one in SAVING)
URGENT = ENDS | _SAVES
"""Reasons that are not put off."""


def is_urgent(reason: str) -> bool:
    """Whether somebody waits for that save: it is not put off, and takes no longer than it must."""
    return reason in URGENT or reason.startswith((ASKED_FOR, FORESEEN))


def add_requester(reason: str) -> str:
    """Return the reason for the checkpoint: of a signal that only saves, the one that ``relight run`` left: who asked, or which alarm."""
    return (take_request(heartbeat().path) if reason in _SAVES else "") or reason


class SignalHandlers:
    """Signal handlers that only take note; ``pending`` is asked at the end of each step.

    - A signal that was ignored when they were installed (``nohup``, ``&`` in a script) stays ignored.
    - Where the script has a handler of its own, it is called as well, and the script decides whether the process ends: Relight saves at the
      end of the step and continues. It is called when the signal comes, or at the end of the step if Relight is working at that moment, or
      if there are several ranks: then on all of them, at the same step. What it raises is raised after the save.
    - Else a signal that ends processes ends this one, after the save.

    A second SIGINT ends at once. A second SIGTERM changes nothing: a job's owner and its launcher may each send one, and the save must not
    be lost by that. A data loader's worker ignores all of them, as the trainer needs its workers to finish the step (see ``workers``). Any
    other forked child leaves SIGINT to its parent, and ends of SIGTERM and SIGHUP: after its parent, if the parent must end, too.
    """

    def __init__(self, on_signal: Callable[[str], None], several_ranks: bool = False) -> None:
        self._on_signal, self._several = on_signal, several_ranks
        self._owner = os.getpid()
        self._previous: dict[int, Any] = {}
        self._handler: _SignalHandler | None = None
        self._installed = False
        self._ending: int | None = None
        self._interrupts = 0
        self._wanted: set[int] = set()
        """Signals that want a save after which the process continues."""
        self._seen: set[int] = set()
        """Those of them that the loop has seen: a signal that comes during a save is for the next step."""
        self._due: list[int] = []
        """Signals of which the script's own handler has not been called yet."""
        self._raised: BaseException | None = None
        """What the script's own handler raised, to be raised after the save."""
        self._reported: set[int] = set()
        self._uncount: Callable[[], object] = lambda: None
        workers.protect()

    @property
    def installed(self) -> bool:
        """Whether signals still reach it."""
        return self._installed

    def install(self) -> None:
        """Install the handlers. Python allows that in the main thread only."""
        if self._installed:
            return
        if threading.current_thread() is not threading.main_thread():
            why = "this is not the main thread, where handlers can be installed; call restore() there, or give signals=False"
            self._report(0, f"SIGTERM, SIGINT, SIGHUP and SIGUSR1 make no save: {why}")
            return
        self._previous.clear()
        self._handler = _SignalHandler(weakref.ref(self), self._previous)
        for number in (*ENDING, *SAVING):
            former = signal.getsignal(number)
            if _live(former, number) is not signal.SIG_IGN:
                self._previous[number] = former
                signal.signal(number, self._handler)
        self._installed = True
        workers.protect()  # a loader's library may have been imported since
        self._uncount = workers.handled(self)

    def restore(self) -> None:
        """Give the handlers back, where they are still ours."""
        if os.getpid() != self._owner:
            return
        self._installed = False  # from here on our handler calls the former one
        self._uncount()
        if threading.current_thread() is not threading.main_thread():
            return
        report_workers()
        for number, previous in self._previous.items():
            if signal.getsignal(number) is self._handler:
                with contextlib.suppress(TypeError, ValueError):  # None: was not installed from Python
                    signal.signal(number, previous)

    @property
    def pending(self) -> str | None:
        """The name of the signal that wants a save now, or None."""
        self._seen = set(self._wanted)
        if self._ending is not None:
            return signal.Signals(self._ending).name
        return next((number.name for number in (*ENDING, *SAVING) if number in self._seen), None)

    @property
    def ending(self) -> bool:
        """Whether the process must end after the save."""
        return self._ending is not None

    def adopt(self, name: str) -> None:
        """Act as if that signal had come: another rank has it."""
        number = signal.Signals[name]
        if number in SAVING or self._script_decides(number):
            self._wanted.add(number)
        elif self._ending is None:
            self._ending = number

    def saved(self) -> None:
        """Note that the wanted save was tried. Report handlers that have taken the place of these."""
        self._wanted -= self._seen
        if self._installed:
            for number in self._previous:
                if signal.getsignal(number) is not self._handler:
                    self._replaced(number)

    def hand_on(self, reason: str | None, alone: bool) -> None:
        """Call the script's own handlers that are still to be called, and raise what one of them raised. ``reason``: that of the step's
        save, which all ranks have in common. ``alone``: no other rank waits for this one."""
        if alone:
            due, self._due = self._due, []
        else:
            due = [number for number in self._previous if signal.Signals(number).name == reason and self._script_decides(number)]
            self._due = [number for number in self._due if number not in due]
        for number in due:
            self._call(number, None)
        if self._raised is not None:
            raised, self._raised = self._raised, None
            raise raised

    def end(self) -> None:
        """End as the signal asks: its former handler, then its default."""
        number = self._ending
        if number is None:
            self.hand_on(None, True)
            return
        previous = _live(self._previous.get(number, signal.SIG_DFL), number)
        self._ending = None
        self.restore()
        if callable(previous):
            previous(number, None)  # Python's own for SIGINT raises KeyboardInterrupt here
            return
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    # -- inside

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._owner:
            workers.in_forked_child(number)
            return
        name = signal.Signals(number).name
        if self._script_decides(number):
            self._wanted.add(number)
            emit("signal.received", f"{name}: saving at the end of this step; the script's own handler decides what follows", signal=name)
            self._on_signal(name)
            if self._outer(number) is not None:
                return  # it has called this one
            if self._several or _in_relight(frame):
                self._due += [number] if number not in self._due else []
            else:
                self._call(number, frame)
            return
        self._interrupts += number == signal.SIGINT
        if number in SAVING:
            self._wanted.add(number)
        elif number == signal.SIGINT and self._interrupts > 1:
            self.restore()
            raise KeyboardInterrupt
        else:
            self._ending = number
            workers.asked()
            quiet_workers()
        then = "saving at the end of this step" if number in SAVING else "finishing this step, saving, then ending"
        emit("signal.received", f"{name}: {then}", signal=name)
        self._on_signal(name)

    def _call(self, number: int, frame: FrameType | None) -> None:
        previous = self._previous[number]
        if self._raised is not None and number == signal.SIGINT:  # the person at the keyboard does not want to wait
            self._raised = None
            previous(number, frame)
            return
        try:
            previous(number, frame)
        except BaseException as error:  # SystemExit and KeyboardInterrupt, too: the save comes first
            self._raised = self._raised or error

    def _script_decides(self, number: int) -> bool:
        """Whether the script has a handler of its own for it, installed before these or around them."""
        return _is_scripts(self._previous.get(number), number) or self._outer(number) is not None

    def _outer(self, number: int) -> Callable[..., Any] | None:
        """The script's handler that was installed after these, and is the one that the system calls."""
        now: Any = signal.getsignal(number)
        while isinstance(now, _SignalHandler) and now is not self._handler:
            now = now.previous.get(number)
        return now if self._installed and now is not self._handler and _is_scripts(now, number) else None

    def _replaced(self, number: int) -> None:
        now, name = signal.getsignal(number), signal.Signals(number).name
        if isinstance(now, _SignalHandler) or number in self._reported:
            return
        main = threading.current_thread() is threading.main_thread()
        if now is signal.default_int_handler and "ipykernel" in sys.modules and main:  # which puts it in place for each cell
            signal.signal(number, self._handler)
            return
        why = f"another handler was installed after Relight's; unless it calls the former one, {name} makes no save"
        self._report(number, f"{name}: {why}")

    def _report(self, number: int, say: str) -> None:
        if number not in self._reported:
            self._reported.add(number)
            emit("signal.unhandled", say, signal=signal.Signals(number).name if number else "")


class _SignalHandler:
    """A handler that neither keeps a forgotten Checkpointer alive nor swallows signals in its name: then the former handler is called."""

    def __init__(self, signals: weakref.ref[SignalHandlers], previous: dict[int, Any]) -> None:
        self._signals, self.previous = signals, previous

    @property
    def is_live(self) -> bool:
        """Whether its Checkpointer still wants signals."""
        signals = self._signals()
        return signals is not None and signals.installed and signals._owner == os.getpid()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Take note of the signal."""
        signals = self._signals()
        if signals is not None and signals.installed:
            signals._handle(number, frame)
            return
        previous = self.previous.get(number)
        if callable(previous):
            previous(number, frame)
        elif previous is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def _is_scripts(handler: object, number: int) -> bool:
    """Whether a handler is the script's own: not the system's or Python's default, nor that of a Checkpointer without such a one."""
    while isinstance(handler, _SignalHandler):
        handler = handler.previous.get(number)
    return callable(handler) and handler is not signal.default_int_handler


def _live(handler: Any, number: int) -> Any:
    """Return ``handler``, or the one before it if it belongs to a Checkpointer that is closed, gone, or the parent process's."""
    while isinstance(handler, _SignalHandler) and not handler.is_live:
        handler = handler.previous.get(number, signal.SIG_DFL)
    return handler


def _in_relight(frame: FrameType | None) -> bool:
    """Whether the signal interrupted Relight's own code: a handler that calls the Checkpointer must not enter it twice."""
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith("relight."):
            return True
        frame = frame.f_back
    return False
