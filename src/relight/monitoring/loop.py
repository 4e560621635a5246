"""A thread that polls the runs every few seconds, and sends alerts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from relight.monitoring.notify import Alarms
from relight.monitoring.overview import RunSeen, Watcher
from relight.observe import emit

EVERY_S = 15.0


class AlertLoop:
    """The thread. ``seen``: the runs at the last poll."""

    def __init__(
        self,
        watcher: Watcher,
        alarms: Alarms | None = None,
        *,
        every_s: float = EVERY_S,
        clock: Callable[[], float] = time.time,
        stop: threading.Event | None = None,
    ) -> None:
        """``stop``: an event that ends the thread, and discards a poll that is running."""
        self._watcher, self._alarms, self._every_s, self._clock = watcher, alarms, every_s, clock
        self._stop = stop or threading.Event()
        self.seen: list[RunSeen] = []
        self._failed = False
        self._thread = threading.Thread(target=self._work, name="relight-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop polling. Waits at most 5 s for a store or a target that does not answer."""
        self._stop.set()
        self._thread.join(5.0)

    def _work(self) -> None:
        while not self._stop.is_set():
            try:
                self._poll(self._clock())
            except Exception as error:  # noqa: BLE001 (one failed poll must not end all later alerts)
                self._report(f"{type(error).__name__}: {error}")
            else:
                self._failed = False
            self._stop.wait(self._every_s)

    def _poll(self, now: float) -> None:
        runs = self._watcher.poll(now)
        if self._stop.is_set():
            return
        self.seen = runs
        if self._alarms is not None:
            self._alarms.update(self.seen, now)

    def _report(self, why: str) -> None:
        """Report the first of consecutive failed polls."""
        if not self._failed:
            self._failed = True
            message = f"polling the runs failed: {why}; no alert is sent until a poll succeeds"
            emit("alert.unsent", message, target="", why=why)
