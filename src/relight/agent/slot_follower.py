"""Write a slot that is still being filled: never ahead of the trainer that fills it, and never committed unless it is
sealed."""

from __future__ import annotations

import time
from collections.abc import Callable

from relight.arena import FILLING, SEALED, Slot
from relight.units import duration_text

PATIENCE_S = 5.0
"""Seconds without progress after which the writer stops following. Once the slot is sealed, its save is written from
the beginning."""
_POLL_S = 0.001


class Abandoned(Exception):
    """The slot is not filled any further, or is filled with another save."""


class SlotFollower:
    """Follows the filling of ``slot`` with save ``number``."""

    def __init__(self, slot: Slot, number: int, is_there: Callable[[], bool]) -> None:
        """``is_there``: whether the trainer that fills the slot is alive."""
        self._slot, self._number, self._is_there = slot, number, is_there

    def until(self, offset: int) -> int:
        """Wait until everything before ``offset`` is filled. Return the filled length. Raise ``Abandoned`` if the
        filling has stopped."""
        return self._wait(offset)

    def sealed(self) -> None:
        """Wait until the slot is sealed. Raise ``Abandoned`` if the filling has stopped."""
        self._wait(None)

    def _wait(self, offset: int | None) -> int:
        seen, since = -1, time.monotonic()
        while True:
            # read before the state: if the slot was reused meanwhile, the state's number differs
            copied = self._slot.copied
            state, number = self._slot.state()
            if number != self._number or state not in (FILLING, SEALED):
                raise Abandoned("the save was aborted")
            if state == SEALED:
                return self._slot.memory.size
            if offset is not None and copied >= offset:
                return copied
            if not self._is_there():
                raise Abandoned("the trainer that filled the slot has ended")
            now = time.monotonic()
            if copied != seen:
                seen, since = copied, now
            elif now - since > PATIENCE_S:
                raise Abandoned(f"nothing was copied for {duration_text(PATIENCE_S)}")
            time.sleep(_POLL_S)
