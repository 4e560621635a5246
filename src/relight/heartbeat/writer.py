"""The trainer's end: what is happening, said as it happens."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator

from relight.heartbeat.heartbeat_page import UPDATING, Heartbeat, HeartbeatPage

SETTING = "RELIGHT_PULSE"
"""The file of this process's page: set by ``relight run``."""


HANDING_OVER = "handing over"
"""The phase of a rank that saves what others held as well, as one of them has died: it is let finish."""


class HeartbeatWriter:
    """Says what this process is at. Without a page it says nothing, at no cost."""

    def __init__(self, path: str = "") -> None:
        self._page: HeartbeatPage | None = None
        self.path = path
        """Of its page; empty if there is none."""
        self._beat = Heartbeat(pid=os.getpid(), phase="starting", since=time.monotonic())
        self._lock = threading.Lock()
        self._asked: dict[int, float] = {}
        if path:
            try:
                self._page = HeartbeatPage(path)
                self._write()
            except (OSError, ValueError):
                self.path = ""

    @property
    def has_reader(self) -> bool:
        """Whether anybody may be listening."""
        return self._page is not None

    @property
    def saves_s(self) -> float:
        """How long the last save took until it was durable; 0 before the first."""
        return self._beat.saves_s

    def phase(self, name: str, expected_s: float = 0.0) -> None:
        """What it is at from now on."""
        self._write(phase=name, since=time.monotonic(), expected_s=expected_s)

    @contextlib.contextmanager
    def during(self, name: str, expected_s: float = 0.0) -> Iterator[None]:
        """The phase, and back to the one before."""
        before = self._beat
        self.phase(name, expected_s)
        try:
            yield
        finally:
            self._write(phase=before.phase, since=time.monotonic(), expected_s=before.expected_s)

    def at(self, url: str, run: str) -> None:
        """Where the run is stored."""
        self._write(url=url, run=run)

    def restored(self, step: int) -> None:
        """From which step it goes on; −1: from none."""
        now = time.monotonic()
        seconds = now - self._beat.since if self._beat.phase == "restoring" else 0.0
        self._write(restored=step, restored_at=now, restore_s=seconds, phase="training", since=now, expected_s=0.0)

    def stepped(self, step: int, loss: float = math.nan) -> None:
        """A step ended."""
        now = time.monotonic()
        first = self._beat.first_at or now
        steps = self._beat.steps + 1
        self._write(step=step, step_at=now, steps=steps, first_at=first, loss=loss, phase="training", since=now, expected_s=0.0)

    def writes(self, agent: int) -> None:
        """Which process writes this one's saves; 0: this one does."""
        if self._beat.agent != agent:
            self._write(agent=agent)

    def is_heir(self, can: bool = True) -> None:
        """Whether it can save what other ranks of this node held, should they die; or, as one has, not."""
        if self._beat.heir != can:
            self._write(heir=int(can))

    def updates(self) -> None:
        """That it is an heir, and past its exchanges of this step: it will come to the step's end whoever dies."""
        self._write(heir=UPDATING)

    def stands_by(self, held_bytes: int) -> None:
        """That the script has a place at which a spare can wait, and how much memory it needs until then."""
        self._write(ahead=held_bytes)

    def save_requested(self, step: int) -> None:
        """A save was asked for."""
        self._asked[step] = time.monotonic()
        self._write(save_since=min(self._asked.values()))

    def sealed(self, step: int) -> None:
        """It can be finished by others."""
        self._write(sealed=max(step, self._beat.sealed))

    def over(self, step: int, durable: bool) -> None:
        """It is durable, or has failed."""
        since = self._asked.pop(step, None)
        waits = min(self._asked.values(), default=0.0)
        if not durable:
            self._write(save_since=waits)
            return
        took = self._beat.saves_s if since is None else time.monotonic() - since
        beat = self._beat
        self._write(save_since=waits, saves_s=took, saves=beat.saves + 1, durable=max(step, beat.durable), sealed=max(step, beat.sealed))

    def _write(self, **changes: object) -> None:
        if self._page is None or self._beat.pid != os.getpid():  # a forked child must not write to its parent's page
            return
        with self._lock:
            self._beat = self._beat._replace(**changes)  # type: ignore[arg-type]
            self._page.write(self._beat)


last_words: list[Callable[[Exception], None]] = []
"""Told of the error that ends the script, under ``relight run``: what is to be done though the script has no ``with`` for it."""


def phase(name: str, expected_s: float = 0.0) -> contextlib.AbstractContextManager[None]:
    """What this process does in a ``with`` block, for whoever watches over it: evaluating, compiling, whatever is no step and takes long.

    ``expected_s``: how long it should take; 0: as long as it took before. Under ``relight run`` it is not taken to hang as long as it is
    within three times that, and five seconds; without, this does nothing.
    """
    return heartbeat().during(name, expected_s)


_teller: HeartbeatWriter | None = None


def heartbeat() -> HeartbeatWriter:
    """This process's; a forked child has none of its parent's."""
    global _teller
    if _teller is None or _teller._beat.pid != os.getpid():
        _teller = HeartbeatWriter(os.environ.pop(SETTING, "") if _teller is None else "")  # its own children are not the ones watched over
    return _teller


def forget() -> None:
    """The next one is made anew: this process has become another."""
    global _teller
    _teller = None
