"""Straggler detection: finds the rank that works while the others wait for it. Pure.

Ranks that train together end their steps together, so step times do not show a straggler. CPU time does. Between two
collectives a rank computes, or waits for a CPU; in a collective it sleeps until the last rank arrives. The straggler is
the rank that never sleeps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import NamedTuple

WINDOW_S = 10.0
SLOWEST_WINDOWS = 3
"""Windows in a row in which the same rank must be the slowest."""
TIMES = 1.5
"""Multiple of the other ranks' median share that a straggler must reach."""
LEAST = 0.3
"""Least share of the time for which a straggler works."""


class Straggler(NamedTuple):
    """A rank that the others wait for."""

    rank: int
    share: float
    """Share of the time in which it worked, or waited for a CPU."""
    others: float
    """Median of that share over the other ranks."""


class Stragglers:
    """Detector of one node's straggler. Call ``update`` regularly with the busy time of each rank."""

    def __init__(self) -> None:
        self._since: tuple[float, dict[int, float]] | None = None
        self._found: deque[int | None] = deque(maxlen=SLOWEST_WINDOWS)
        self.now: Straggler | None = None
        """The present straggler, or None."""

    def update(self, now: float, busy_s: Mapping[int, float]) -> Straggler | None:
        """Return a newly detected straggler, else None.

        ``busy_s``: by rank, seconds of work since its process began.
        """
        if (
            self._since is None
            or set(self._since[1]) != set(busy_s)
            or any(busy_s[rank] < then for rank, then in self._since[1].items())
        ):
            self._since = (now, dict(busy_s))
            return None
        began, before = self._since
        if now - began < WINDOW_S or len(busy_s) < 2:
            return None
        self._since = (now, dict(busy_s))
        shares = {rank: (busy_s[rank] - before[rank]) / (now - began) for rank in busy_s}
        rank = max(shares, key=lambda other: shares[other])
        other_share = median(share for other_rank, share in shares.items() if other_rank != rank)
        holds_up = shares[rank] >= max(LEAST, TIMES * other_share)
        self._found.append(rank if holds_up else None)
        if len(self._found) < SLOWEST_WINDOWS or set(self._found) != {rank}:
            self.now = self.now if rank in self._found and self.now is not None and self.now.rank == rank else None
            return None
        is_present = self.now is not None and self.now.rank == rank
        self.now = Straggler(rank, shares[rank], other_share)
        return None if is_present else self.now
