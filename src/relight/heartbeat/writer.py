"""The trainer's end of the heartbeat: publishes the process's phase, steps and saves."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator

from relight.heartbeat.heartbeat_page import UPDATING, Heartbeat, HeartbeatPage
from relight.settings.amounts import seconds_of
from relight.units import Duration

SETTING = "RELIGHT_HEARTBEAT"
"""The file of this process's page: set by ``relight run``."""


HANDING_OVER = "handing over"
"""The phase of a rank that saves the state of a rank that has died: the supervisor lets it finish."""
ENDED = "ended"
"""The phase of a rank that has closed its Checkpointer: the rest of its script may take any time."""


class HeartbeatWriter:
    """Publishes this process's state in its page. Without a page it does nothing, at no cost."""

    def __init__(self, path: str = "") -> None:
        self._page: HeartbeatPage | None = None
        self.path = path
        """Path of its page; empty if there is none."""
        self._beat = Heartbeat(pid=os.getpid(), phase="starting", since=time.monotonic())
        self._lock = threading.Lock()
        self._asked: dict[int, float] = {}
        self._paused_s = 0.0
        if path:
            try:
                self._page = HeartbeatPage(path)
                self._write()
            except (OSError, ValueError):
                self.path = ""

    @property
    def has_reader(self) -> bool:
        """Return whether there is a page, and so perhaps a supervisor that reads it."""
        return self._page is not None

    @property
    def saves_s(self) -> float:
        """Seconds that the last save took until it was durable; 0 before the first."""
        return self._beat.saves_s

    def phase(self, name: str, expected_s: float = 0.0) -> None:
        """Publish the present phase."""
        self._write(phase=name, since=time.monotonic(), expected_s=expected_s)

    @contextlib.contextmanager
    def during(self, name: str, expected_s: float = 0.0) -> Iterator[None]:
        """Publish a phase for a ``with`` block, then the previous phase again."""
        before = self._beat
        self.phase(name, expected_s)
        try:
            yield
        finally:
            self._write(phase=before.phase, since=time.monotonic(), expected_s=before.expected_s)

    def at(self, url: str, run: str) -> None:
        """Publish where the run is stored."""
        self._write(url=url, run=run)

    def restored(self, step: int) -> None:
        """Publish the restored step; −1 for a fresh run."""
        now = time.monotonic()
        seconds = now - self._beat.since if self._beat.phase == "restoring" else 0.0
        self._write(restored=step, restored_at=now, restore_s=seconds, phase="training", since=now, expected_s=0.0)

    def stepped(self, step: int, loss: float = math.nan) -> None:
        """Publish that a step has completed."""
        now = time.monotonic()
        first = self._beat.first_at or now
        steps = self._beat.steps + 1
        self._write(
            step=step, step_at=now, steps=steps, first_at=first, loss=loss, phase="training", since=now, expected_s=0.0,
            paused_s=self._paused_s,
        )  # fmt: skip

    def paused(self, seconds: float) -> None:
        """Add a pause between two steps. It is published with the next step, so that it belongs to that step's time."""
        self._paused_s += seconds

    def writes(self, agent: int) -> None:
        """Publish the pid of the process that writes this one's saves; 0: this process."""
        if self._beat.agent != agent:
            self._write(agent=agent)

    def is_heir(self, can: bool = True) -> None:
        """Publish whether this rank can save the state of ranks of this node that die; False once a rank has died."""
        if self._beat.heir != can:
            self._write(heir=int(can))

    def updates(self) -> None:
        """Publish that this rank can take over and is past this step's collectives: it reaches the step's end even if
        other ranks die."""
        self._write(heir=UPDATING)

    def stands_by(self, held_bytes: int) -> None:
        """Publish that the script calls ``standby()``, and how much memory it has there."""
        self._write(ahead=held_bytes)

    def ends_unsupervised(self) -> None:
        """Publish that the ranks save and end because the supervisor of some of them is gone."""
        self._write(unsupervised=1)

    def save_requested(self, step: int) -> None:
        """Publish that a save was requested."""
        self._asked[step] = time.monotonic()
        self._write(save_since=min(self._asked.values()))

    def sealed(self, step: int) -> None:
        """Publish that another process can finish this step's save."""
        self._write(sealed=max(step, self._beat.sealed))

    def over(self, step: int, durable: bool) -> None:
        """Publish that a save is durable, or has failed."""
        since = self._asked.pop(step, None)
        waits = min(self._asked.values(), default=0.0)
        if not durable:
            self._write(save_since=waits)
            return
        took = self._beat.saves_s if since is None else time.monotonic() - since
        beat = self._beat
        self._write(
            save_since=waits,
            saves_s=took,
            saves=beat.saves + 1,
            durable=max(step, beat.durable),
            sealed=max(step, beat.sealed),
        )

    def _write(self, **changes: object) -> None:
        if self._page is None or self._beat.pid != os.getpid():  # a forked child must not write to its parent's page
            return
        with self._lock:
            self._beat = self._beat._replace(**changes)  # type: ignore[arg-type]
            self._page.write(self._beat)


last_words: list[Callable[[Exception], None]] = []
"""Called with the error that ends the script, under ``relight run``: cleanup for scripts that use no ``with`` block."""


def phase(name: str, expected_s: Duration = 0.0) -> contextlib.AbstractContextManager[None]:
    """Publish a phase for a ``with`` block, for example evaluation or compilation: long work that is not a step.

    Under ``relight run`` the process counts as hanging only after three times the expected duration and five seconds.
    Without ``relight run`` this does nothing.

    Args:
        name: The phase's name, for reports.
        expected_s: How long it should take: ``"10m"``, a ``timedelta``, or seconds. 0: as long as it took before.
    """
    return heartbeat().during(name, 0.0 if expected_s == 0 else seconds_of(expected_s, "phase(expected_s=…)"))


_teller: HeartbeatWriter | None = None
"""One page for each process: the supervisor creates it and names it in the environment."""


def heartbeat() -> HeartbeatWriter:
    """Return this process's heartbeat. A forked child does not inherit its parent's."""
    global _teller
    if _teller is None or _teller._beat.pid != os.getpid():
        # its children are not supervised
        _teller = HeartbeatWriter(os.environ.pop(SETTING, "") if _teller is None else "")
    return _teller


def forget() -> None:
    """Drop the heartbeat, so that the next call creates one: this process has become another rank."""
    global _teller
    _teller = None
