"""Bounds on concurrent requests: of all askers, of one, and of all without credentials.

Further requests wait for a slot, or are refused.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from relight.serve.scope import ANONYMOUS

MOST, OF_ONE, OF_ANONYMOUS = 24, 6, 3
"""Fewer than the threads that requests run in (40), so that no request waits for a thread. Pages are made by Python code, which runs one
thread at a time: more threads for strangers only slow down the loop, which answers health."""
OF_ONE_ANONYMOUS = OF_ANONYMOUS - 1
"""One client without credentials never has the last slot of those clients."""
WAITING_MAX, WAITING_OF_ONE_MAX, WAITING_OF_ANONYMOUS_MAX, WAIT_S = 32, 12, 16, 5.0


class StreamSlots:
    """Slots for requests. They belong to the server's event loop."""

    def __init__(self) -> None:
        self._taken: Counter[str] = Counter()
        self._waiting: list[tuple[str, asyncio.Future[None]]] = []

    @property
    def taken(self) -> int:
        """Number of requests that hold a slot."""
        return self._taken.total()

    async def take(self, asker: str) -> bool:
        """Take a slot, or wait for one. Return False if too many wait, or none came free in time."""
        if self._may(asker):
            self._taken[asker] += 1
            return True
        mine = sum(one == asker for one, _ in self._waiting)
        strangers = sum(one.startswith(ANONYMOUS) for one, _ in self._waiting)
        if len(self._waiting) >= WAITING_MAX or mine >= WAITING_OF_ONE_MAX:
            return False
        if asker.startswith(ANONYMOUS) and strangers >= WAITING_OF_ANONYMOUS_MAX:
            return False
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((asker, turn))
        try:
            async with asyncio.timeout(WAIT_S):
                await asyncio.shield(turn)
        except TimeoutError:
            return self._gave_up(asker, turn)
        except BaseException:
            if self._gave_up(asker, turn):
                self.give(asker)
            raise
        return True

    def _gave_up(self, asker: str, turn: asyncio.Future[None]) -> bool:
        """Stop waiting. Return whether the slot was taken at the very end."""
        if turn.done():
            return True
        self._waiting.remove((asker, turn))
        return False

    def give(self, asker: str) -> None:
        """Return the slot, and give it to the first waiting request that is within its bounds."""
        self._taken[asker] -= 1
        if not self._taken[asker]:
            del self._taken[asker]
        for one in list(self._waiting):
            if self._may(one[0]):
                self._waiting.remove(one)
                self._taken[one[0]] += 1
                one[1].set_result(None)

    def _may(self, asker: str) -> bool:
        if asker.startswith(ANONYMOUS):
            strangers = sum(count for one, count in self._taken.items() if one.startswith(ANONYMOUS))
            if strangers >= OF_ANONYMOUS or self._taken[asker] >= OF_ONE_ANONYMOUS:
                return False
        return self._taken.total() < MOST and self._taken[asker] < OF_ONE
