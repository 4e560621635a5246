"""Rate limit for wrong tokens, by client and by token: each answer is later than the last. Valid tokens are never delayed or refused."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable

from relight.serve.limits import ASKERS_MAX

FIRST_S, LAST_S = 0.1, 5.0
"""Seconds of delay for the first wrong token above the allowed rate. The delay doubles with each further one, up to ``LAST_S``."""
HELD_MAX, HELD_OF_ONE_MAX = 32, 4
"""Answers that are delayed at a time: of all clients, and of one. Further wrong tokens are refused at once, so that delayed answers do not
use up the connections that other clients need."""


class Guesses:
    """Counts of wrong tokens. A count falls by ``per_minute`` each minute; below ``per_minute`` there is no delay. Event loop only."""

    def __init__(
        self,
        per_minute: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._per_minute, self._clock, self._sleep = per_minute, clock, sleep
        self._counts: OrderedDict[str, tuple[float, float]] = OrderedDict()
        self._held: Counter[str] = Counter()

    async def wrong(self, asker: str, token: str) -> float:
        """Count a wrong token, wait for its delay, and return 0.

        If too many answers are delayed already, return the seconds for ``Retry-After`` at once.
        """
        digest = hashlib.sha256(token.encode("utf-8", "replace")).hexdigest()
        delay = max(self._delay(f"from {asker}"), self._delay(f"token {digest}"))
        if not delay:
            return 0.0
        if self._held[asker] >= HELD_OF_ONE_MAX or self._held.total() >= HELD_MAX:
            return delay
        self._held[asker] += 1
        try:
            await self._sleep(delay)
        finally:
            self._held[asker] -= 1
            if not self._held[asker]:
                del self._held[asker]
        return 0.0

    def _delay(self, key: str) -> float:
        """Count one more wrong token and return the delay of its answer in seconds."""
        now = self._clock()
        count, counted_at = self._counts.pop(key, (0.0, now))
        count = max(0.0, count - (now - counted_at) * self._per_minute / 60) + 1
        self._counts[key] = count, now
        while len(self._counts) > ASKERS_MAX:
            self._counts.popitem(last=False)
        above = count - self._per_minute
        return min(LAST_S, FIRST_S * 2 ** min(above - 1, 16)) if above > 0 else 0.0
