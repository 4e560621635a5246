"""Rate limits: one token bucket for each of a bounded number of callers."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

ASKERS_MAX = 10_000


class Limiter:
    """Allow each caller ``per_second`` requests on average and ``burst`` at once.

    At more than ``ASKERS_MAX`` callers, the least recently seen ones are forgotten.
    """

    def __init__(self, per_second: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second, self._burst, self._clock = per_second, burst, clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait_s(self, asker: str, cost: float = 1.0) -> float:
        """Return 0 and take ``cost`` tokens, or return the seconds until a request is allowed. A cost of 0 only checks."""
        now = self._clock()
        tokens, filled_at = self._buckets.pop(asker, (float(self._burst), now))
        tokens = min(float(self._burst), tokens + (now - filled_at) * self._per_second)
        may = tokens >= 1.0
        self._buckets[asker] = (tokens - cost if may else tokens, now)
        while len(self._buckets) > ASKERS_MAX:
            self._buckets.popitem(last=False)
        return 0.0 if may else (1.0 - tokens) / self._per_second
