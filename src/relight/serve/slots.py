"""Limits on concurrent requests: of all callers, of one caller, and of all without credentials.

Further requests wait for a slot, or are refused.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from relight.serve.scope import ANONYMOUS

MOST, OF_ONE, OF_ANONYMOUS = 24, 6, 3
"""Slots: fewer than the threads that run requests (40), so that no request waits for a thread. Python code runs in one thread at a time, so
more threads for clients without credentials would only slow down the event loop, which answers health checks."""
OF_ONE_ANONYMOUS = OF_ANONYMOUS - 1
"""Slots of one client without credentials: it never has the last slot of all these clients."""
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
        """Take a slot, or wait up to ``WAIT_S`` for one. Return False if too many requests wait, or no slot became free in time."""
        if self._may_take(asker):
            self._taken[asker] += 1
            return True
        own_waiting = sum(waiter == asker for waiter, _ in self._waiting)
        strangers = sum(waiter.startswith(ANONYMOUS) for waiter, _ in self._waiting)
        if len(self._waiting) >= WAITING_MAX or own_waiting >= WAITING_OF_ONE_MAX:
            return False
        if asker.startswith(ANONYMOUS) and strangers >= WAITING_OF_ANONYMOUS_MAX:
            return False
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((asker, turn))
        try:
            async with asyncio.timeout(WAIT_S):
                await asyncio.shield(turn)
        except TimeoutError:
            return self._leave_queue(asker, turn)
        except BaseException:
            if self._leave_queue(asker, turn):
                self.give(asker)
            raise
        return True

    def _leave_queue(self, asker: str, turn: asyncio.Future[None]) -> bool:
        """Stop waiting. Return whether the slot was assigned just before."""
        if turn.done():
            return True
        self._waiting.remove((asker, turn))
        return False

    def give(self, asker: str) -> None:
        """Release the slot, and assign free slots to waiting requests in order, within their limits."""
        self._taken[asker] -= 1
        if not self._taken[asker]:
            del self._taken[asker]
        for waiter in list(self._waiting):
            if self._may_take(waiter[0]):
                self._waiting.remove(waiter)
                self._taken[waiter[0]] += 1
                waiter[1].set_result(None)

    def _may_take(self, asker: str) -> bool:
        if asker.startswith(ANONYMOUS):
            strangers = sum(count for holder, count in self._taken.items() if holder.startswith(ANONYMOUS))
            if strangers >= OF_ANONYMOUS or self._taken[asker] >= OF_ONE_ANONYMOUS:
                return False
        return self._taken.total() < MOST and self._taken[asker] < OF_ONE
