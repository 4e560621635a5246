"""Rank state published before the update, and whether it has always equalled the state at the step's end: only then may
a handover use it."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from relight.heartbeat import RankStateWriter

ALIKE = 3
"""Number of steps after which the state must have been equal, and never different, before a handover may use it."""
AHEAD_S = 1e-3
"""Most seconds that publishing may take, or ``AHEAD_SHARE`` of a step if that is longer; if it always takes more, it is
stopped."""
AHEAD_SHARE = 0.03
OFTEN = 5
"""Number of consecutive slow publications after which it is stopped: a single one may be due to other load on the
machine."""


class PreUpdateState:
    """The state that this rank published before its update, compared with its state at the step's end."""

    def __init__(self) -> None:
        self.will: RankStateWriter | None = None
        """The writer; None: publishing is impossible, too slow, or the state was different once."""
        self.parts: list[Any] | None = None
        """The published state of the current step; None: its update has not started."""
        self.was_alike = False
        """Whether the state at the end of the last step was equal to the published one."""
        self._alike = 0
        self._took: list[float] = []
        self._began: float | None = None
        self._step_s = 0.0

    def begins(self, step: int, parts: list[Any]) -> None:
        """Publish ``parts`` before the first update after the end of ``step``."""
        now = time.monotonic()
        if self._began is not None:
            self._step_s = now - self._began
        self._began = now
        self.parts = parts
        if self.will is not None:
            self.will.write(step, msgspec.msgpack.encode([self._alike, *parts]))

    def ends(self, parts: list[Any]) -> None:
        """Compare the published state with ``parts``, this rank's own state at the step's end."""
        if self.parts is not None:
            self.was_alike = self.parts == parts
            self._alike += 1
            if not self.was_alike:  # it may differ again at any later step
                self.will = None
        else:
            self.was_alike = False
        self.parts = None

    def took(self, seconds: float) -> None:
        """Record the seconds of CPU time that publishing took in this thread. Stop publishing if it is always too
        slow."""
        self._took = [*self._took[1 - OFTEN :], seconds]
        if len(self._took) == OFTEN and min(self._took) > max(AHEAD_S, AHEAD_SHARE * self._step_s):
            self.will = None
