"""Pause between steps while the supervisor reduces the load of this node."""

from __future__ import annotations

import time
from collections.abc import Callable

from relight.heartbeat.ease import read_ease

PAUSE_MAX_S = 5.0
"""Maximum seconds of one pause, so that a signal does not wait for long."""


class StepPauses:
    """Pauses of one process. Tests may replace ``clock`` and ``sleep``."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._since: float | None = None

    def after_step(self, page: str) -> float:
        """Sleep for the share of time that the supervisor requests, and return the seconds.

        ``page``: path of the heartbeat page, or empty.
        """
        now = self._clock()
        worked = 0.0 if self._since is None else now - self._since
        eased = read_ease(page) if page else None
        self._since = now
        if eased is None or now >= eased.until:
            return 0.0
        seconds = min(worked * eased.share / (1 - eased.share), PAUSE_MAX_S)
        self._sleep(seconds)
        self._since = self._clock()
        return seconds
