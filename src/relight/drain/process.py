"""The process that drains.

It is started when there is something to drain, and ends after that. It does not slow or interrupt saves.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from relight.comm import new_threads
from relight.comm.children import child_command, child_environment
from relight.comm.standstill import CHECK_S, COPIER, Standstill
from relight.keys import StoreSecurity

PAUSE_S = 5.0
"""Seconds before a failed tier is tried again; doubled each time."""
PAUSE_MAX_S = 300.0
KNOWN_MAX = 256
Notify = Callable[[str, str, dict[str, Any]], None]


class Drainer:
    """Drains one run when it is woken.

    ``notify`` is called with its events, in another thread. ``patient`` returns whether to try again after a failure:
    whether a process still waits for the copies. ``ranks`` returns this node's ranks: see ``drain``.
    """

    def __init__(
        self,
        url: str,
        run: str,
        notify: Notify,
        patient: Callable[[], bool],
        *,
        nice: int = 15,
        guard: StoreSecurity | None = None,
        ranks: Callable[[], Iterable[int]] = lambda: (),
    ) -> None:
        self._guard = guard or StoreSecurity()
        self._url, self._run, self._notify, self._patient, self._nice = url, run, notify, patient, nice
        self._ranks = ranks
        self._changed = threading.Condition()
        self._woken = self._working = self._stopped = False
        self._child: subprocess.Popen[bytes] | None = None
        self._known: deque[tuple[str, str]] = deque(maxlen=KNOWN_MAX)
        """Tier and id of copies that were reported."""
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Return whether a drain is requested or running."""
        with self._changed:
            return (self._woken or self._working) and not self._stopped

    def wake(self) -> None:
        """Request a drain."""
        with self._changed:
            if self._stopped:
                return
            self._woken = True
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="relight-drainer", daemon=True)
                if not new_threads.start(thread):  # the next save's call tries again
                    self._woken = False
                    return
                self._thread = thread
            self._changed.notify_all()

    def wait(self, timeout: float) -> bool:
        """Wait until no drain is requested or running. Return False if that takes longer than ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._woken or self._working), timeout)

    def stop(self) -> None:
        """Stop draining. The next drain continues the present copy."""
        with self._changed:
            self._stopped = True
            child = self._child
            self._changed.notify_all()
        if child is not None:
            child.terminate()
            child.send_signal(signal.SIGCONT)  # one that is stopped gets the signal only then
        if self._thread is not None:
            self._thread.join(10.0)
        if child is not None and child.poll() is None:
            child.kill()

    def _work(self) -> None:
        pause = PAUSE_S
        while True:
            with self._changed:
                self._working = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._woken or self._stopped)
                if self._stopped:
                    return
                self._woken, self._working = False, True
            try:
                done = self._run_once()
            except OSError:  # no process or file descriptor is free
                done = False
            if done:
                pause = PAUSE_S
                continue
            if not self._patient():
                continue
            self._rest(pause)
            pause = min(2 * pause, PAUSE_MAX_S)

    def _rest(self, pause: float) -> None:
        """Wait before the next try.

        A request, or ``patient`` becoming False, ends the wait; in the second case the next try is the last.
        """
        ends = time.monotonic() + pause
        while (left := ends - time.monotonic()) > 0 and self._patient():
            with self._changed:
                if self._changed.wait_for(lambda: self._woken or self._stopped, min(left, 0.5)):
                    break
        with self._changed:
            self._woken = not self._stopped

    def _run_once(self) -> bool:
        """Run the process once, and pass its events on. Return whether all tiers have what they must hold."""
        with self._changed:
            if self._stopped:
                return True
            child = self._child = subprocess.Popen(
                child_command("relight.drain", self._url, self._run, str(self._nice), *map(str, sorted(self._ranks()))),
                env=child_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                cwd="/",
            )
        assert child.stdin is not None and child.stdout is not None
        with child.stdin, child.stdout:  # the child stops when its standard input ends, so it ends with this process
            child.stdin.write(self._guard.to_line())
            child.stdin.flush()
            for line in _lines(child.stdout.fileno(), Standstill(child.pid, words=COPIER)):
                try:
                    name, text, fields = json.loads(line)
                except ValueError:
                    continue
                if self._is_news(name, fields):
                    self._notify(name, text, fields)
        status = child.wait()
        with self._changed:
            self._child = None
        return status == 0

    def _is_news(self, name: str, fields: dict[str, Any]) -> bool:
        """Return whether an event is new. Each process reports the copies that exist, so a copy is passed on once."""
        copy = (str(fields.get("tier")), str(fields.get("id")))
        if name not in ("drain.done", "drain.found"):
            return True
        known = copy in self._known
        if not known:
            self._known.append(copy)
        return name == "drain.done" or not known


def _lines(fd: int, standstill: Standstill) -> Iterator[bytes]:
    """Yield the lines that the child writes until its end.

    A child that is stopped is continued or killed: close() may wait for copies.
    """
    waiting, buffer = select.poll(), b""
    waiting.register(fd, select.POLLIN)
    while True:
        while not waiting.poll(1000 * CHECK_S):
            standstill.check(True)
        data = os.read(fd, 1 << 16)
        if not data:
            return
        *lines, buffer = (buffer + data).split(b"\n")
        yield from lines
