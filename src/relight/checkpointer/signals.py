"""Signal handlers: finish the step, save, then end by the signal. SIGUSR1 only saves."""

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
from relight.heartbeat import heartbeat, take_request
from relight.observe import emit
from relight.save_reason import SaveReason

ENDING = workers.ENDING
SAVING = (signal.SIGUSR1,)


def add_requester(reason: SaveReason) -> SaveReason:
    """Return the reason to record.

    For a signal that only saves, it is the one that ``relight run`` stored: the requester, or an alarm.
    """
    saves = reason.kind == "signal" and not reason.is_ending_signal
    return (take_request(heartbeat().path) if saves else None) or reason


class SignalHandlers:
    """Signal handlers that only record the signal. The loop reads ``pending`` at the end of each step.

    - A signal that was ignored when they were installed (``nohup``, ``&`` in a script) stays ignored.
    - Where the script has a handler of its own, it is called as well, and the script decides whether the process ends:
      Relight saves at the end of the step and continues. The script's handler is called when the signal arrives, or at
      the end of the step if the signal has interrupted Relight's own code, or if there are several ranks: then on all
      ranks, at the same step. Its exception is raised after the save.
    - Otherwise a signal that ends processes ends this one, after the save.

    A second SIGINT ends the process at once. A second SIGTERM changes nothing: a job's owner and its launcher may each
    send one, and the save must not be lost by that. A data loader's worker ignores all these signals, as the trainer
    needs its workers to finish the step (see ``workers``). Any other forked child leaves SIGINT to its parent, and ends
    by SIGTERM and SIGHUP, after its parent if that must end, too.
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
        """The wanted signals that the loop has read: a signal that arrives during a save is handled at the next
        step."""
        self._due: list[int] = []
        """Signals for which the script's own handler has not been called yet."""
        self._raised: BaseException | None = None
        """The exception of the script's own handler, raised after the save."""
        self._reported: set[int] = set()
        self._uncount: Callable[[], object] = lambda: None
        workers.protect()

    @property
    def installed(self) -> bool:
        """Whether these handlers still receive signals."""
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
        """Restore the former handler of each signal that Relight still handles."""
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
        """Act as if the signal ``name`` had arrived: another rank has received it."""
        number = signal.Signals[name]
        if number in SAVING or self._script_decides(number):
            self._wanted.add(number)
        elif self._ending is None:
            self._ending = number

    def saved(self) -> None:
        """Record that the wanted save was tried. Report handlers that have replaced these."""
        self._wanted -= self._seen
        if self._installed:
            for number in self._previous:
                if signal.getsignal(number) is not self._handler:
                    self._replaced(number)

    def hand_on(self, reason: SaveReason | None, alone: bool) -> None:
        """Call the script's own handlers that are still due, and raise the exception of one of them.

        ``reason``: the reason of the step's save, the same on all ranks. ``alone``: no other rank waits for this one.
        """
        if alone:
            numbers, self._due = self._due, []
        else:
            name = reason.by if reason is not None and reason.kind == "signal" else ""
            numbers = [
                number
                for number in self._previous
                if signal.Signals(number).name == name and self._script_decides(number)
            ]
            self._due = [number for number in self._due if number not in numbers]
        for number in numbers:
            self._call(number, None)
        if self._raised is not None:
            raised, self._raised = self._raised, None
            raise raised

    def end(self) -> None:
        """End by the signal: call its former handler, else restore the default action and send the signal to this
        process."""
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
            emit(
                "signal.received",
                f"{name}: saving at the end of this step; the script's own handler decides what follows",
                signal=name,
            )
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
        effect = "saving at the end of this step" if number in SAVING else "finishing this step, saving, then ending"
        emit("signal.received", f"{name}: {effect}", signal=name)
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
        """Return whether the script has its own handler for the signal, installed before these handlers or around
        them."""
        return _is_scripts(self._previous.get(number), number) or self._outer(number) is not None

    def _outer(self, number: int) -> Callable[..., Any] | None:
        """Return the script's handler that was installed after these, and which the system therefore calls; None if
        there is none."""
        now: Any = signal.getsignal(number)
        while isinstance(now, _SignalHandler) and now is not self._handler:
            now = now.previous.get(number)
        return now if self._installed and now is not self._handler and _is_scripts(now, number) else None

    def _replaced(self, number: int) -> None:
        now, name = signal.getsignal(number), signal.Signals(number).name
        if isinstance(now, _SignalHandler) or number in self._reported:
            return
        main = threading.current_thread() is threading.main_thread()
        # ipykernel installs it for each cell
        if now is signal.default_int_handler and "ipykernel" in sys.modules and main:
            signal.signal(number, self._handler)
            return
        cause = f"another handler was installed after Relight's; unless it calls the former one, {name} makes no save"
        self._report(number, f"{name}: {cause}")

    def _report(self, number: int, message: str) -> None:
        if number not in self._reported:
            self._reported.add(number)
            emit("signal.unhandled", message, signal=signal.Signals(number).name if number else "")


class _SignalHandler:
    """A handler that does not keep an unreferenced Checkpointer alive.

    Once that is gone or closed, it calls the former handler.
    """

    def __init__(self, signals: weakref.ref[SignalHandlers], previous: dict[int, Any]) -> None:
        self._signals, self.previous = signals, previous

    @property
    def is_live(self) -> bool:
        """Whether its Checkpointer still wants signals."""
        signals = self._signals()
        return signals is not None and signals.installed and signals._owner == os.getpid()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Record the signal, or call the former handler."""
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
    """Return whether a handler is the script's own.

    A Checkpointer's handler counts as the former handler that it calls.
    """
    while isinstance(handler, _SignalHandler):
        handler = handler.previous.get(number)
    return callable(handler) and handler is not signal.default_int_handler


def _live(handler: Any, number: int) -> Any:
    """Return ``handler``, or the one before it if it belongs to a Checkpointer that is closed, gone, or the parent process's."""
    while isinstance(handler, _SignalHandler) and not handler.is_live:
        handler = handler.previous.get(number, signal.SIG_DFL)
    return handler


def _in_relight(frame: FrameType | None) -> bool:
    """Return whether the signal interrupted Relight's own code: a handler that calls the Checkpointer must not enter it
    twice."""
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith("relight."):
            return True
        frame = frame.f_back
    return False


def _in_child() -> None:
    """Send a terminated child its SIGTERM again. Python forgets a signal that arrives between the fork and this call, and the trainer
    would wait for the child without end."""
    if workers.is_terminated() and isinstance(signal.getsignal(signal.SIGTERM), _SignalHandler):
        os.kill(os.getpid(), signal.SIGTERM)


os.register_at_fork(after_in_child=_in_child)
