"""What a rank leaves in front of its update, and whether that is what it has at the step's end: only then may another rank believe it."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from relight.heartbeat import RankStateWriter

ALIKE = 3
"""It counts if it has been the same at the end of so many steps, and never another."""
AHEAD_S = 1e-3
"""Leaving it may take so long, or AHEAD_SHARE of a step if that is longer; what never takes less is given up."""
AHEAD_SHARE = 0.03
OFTEN = 5
"""Given up if none of the last so many was quicker: one alone says more of the machine than of what there is to leave."""


class PreUpdateState:
    """What this rank left in front of its update, held against what it had at the step's end."""

    def __init__(self) -> None:
        self.will: RankStateWriter | None = None
        """None: it cannot be left, is not worth it, or was another once."""
        self.parts: list[Any] | None = None
        """Of the step that is under way; None: its update has not begun."""
        self.was_alike = False
        """Whether, at the end of the last step, it was still so."""
        self._alike = 0
        self._took: list[float] = []
        self._began: float | None = None
        self._step_s = 0.0

    def begins(self, step: int, parts: list[Any]) -> None:
        """The update behind the end of ``step``."""
        now = time.monotonic()
        if self._began is not None:
            self._step_s = now - self._began
        self._began = now
        self.parts = parts
        if self.will is not None:
            self.will.write(step, msgspec.msgpack.encode([self._alike, *parts]))

    def ends(self, parts: list[Any]) -> None:
        """The step, with what is this rank's own then."""
        if self.parts is not None:
            self.was_alike = self.parts == parts
            self._alike += 1
            if not self.was_alike:  # and nobody can tell when it is so again
                self.will = None
        else:
            self.was_alike = False
        self.parts = None

    def took(self, seconds: float) -> None:
        """To leave it, of this thread's processor time."""
        self._took = [*self._took[1 - OFTEN :], seconds]
        if len(self._took) == OFTEN and min(self._took) > max(AHEAD_S, AHEAD_SHARE * self._step_s):
            self.will = None
