"""Writing a slot that is still being filled: never ahead of who fills it, and never committed unless it is sealed."""

from __future__ import annotations

import time
from collections.abc import Callable

from relight.arena import FILLING, SEALED, Slot

PATIENCE_S = 5.0
"""How long the filling may stand still before the writer turns to something else; once sealed, the save is written from the beginning."""
_POLL_S = 0.001


class Abandoned(Exception):
    """This slot is not filled any further, or no longer with this save."""


class SlotFollower:
    """Save ``number`` in ``slot``, as its filling goes on."""

    def __init__(self, slot: Slot, number: int, is_there: Callable[[], bool]) -> None:
        """``is_there``: whether the one that fills it lives."""
        self._slot, self._number, self._is_there = slot, number, is_there

    def until(self, offset: int) -> int:
        """Wait until all before ``offset`` is filled; up to where it is. ``Abandoned`` if it does not go on."""
        return self._wait(offset)

    def sealed(self) -> None:
        """Wait until all of it is sealed. ``Abandoned`` if it is not to be."""
        self._wait(None)

    def _wait(self, offset: int | None) -> int:
        seen, since = -1, time.monotonic()
        while True:
            there = self._slot.copied  # before the state: a slot that was begun anew is told apart by its number
            state, number = self._slot.state()
            if number != self._number or state not in (FILLING, SEALED):
                raise Abandoned("the save was given up")
            if state == SEALED:
                return self._slot.memory.size
            if offset is not None and there >= offset:
                return there
            if not self._is_there():
                raise Abandoned("who filled the slot is gone")
            now = time.monotonic()
            if there != seen:
                seen, since = there, now
            elif now - since > PATIENCE_S:
                raise Abandoned(f"nothing was copied for {PATIENCE_S:.0f} s")
            time.sleep(_POLL_S)
