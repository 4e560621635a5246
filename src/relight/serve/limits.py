"""Rate limits: one token bucket for each of a bounded number of askers."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

ASKERS_MAX = 10_000


class Limiter:
    """Allow each asker ``per_second`` requests on average and ``burst`` at once.

    The least recently seen askers are forgotten first.
    """

    def __init__(self, per_second: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second, self._burst, self._clock = per_second, burst, clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait_s(self, asker: str, cost: float = 1.0) -> float:
        """Return 0 and count the request ``cost`` times, or return the seconds to wait. A cost of 0 only checks."""
        now = self._clock()
        left, at = self._buckets.pop(asker, (float(self._burst), now))
        left = min(float(self._burst), left + (now - at) * self._per_second)
        may = left >= 1.0
        self._buckets[asker] = (left - cost if may else left, now)
        while len(self._buckets) > ASKERS_MAX:
            self._buckets.popitem(last=False)
        return 0.0 if may else (1.0 - left) / self._per_second
