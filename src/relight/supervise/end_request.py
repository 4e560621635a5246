"""The signal that asks the job to end, and the time that this process then has."""

from __future__ import annotations

import math
from collections.abc import Callable

from relight.policy.grace import kept_back


class EndRequest:
    """The request to end. The main thread, and the signal handler in it, call all methods."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.signal = ""
        """The signal that asked the job to end, in words; empty if none has, or if this process has sent it itself."""
        self.grace_s = 0.0
        """Seconds from the first signal until this process must have exited; 0: unknown."""
        self._exits_at, self._clock = math.inf, clock

    def received(self, signal_name: str, *, is_own: bool) -> None:
        """Record a signal. ``is_own``: this process has sent it to itself, because the end was announced in another way.

        The grace period begins with the first one. Half of what the supervisor reserves of it is for the exit itself.
        """
        if not is_own:
            self.signal = f"{signal_name} came"
        if self.grace_s and math.isinf(self._exits_at):
            self._exits_at = self._clock() + self.grace_s - kept_back(self.grace_s) / 2

    @property
    def left_s(self) -> float:
        """Return the seconds that this process has left; infinite without a request, or if the grace period is unknown."""
        return max(0.0, self._exits_at - self._clock())
