"""Which rank holds the others up, told by who works while they wait. Pure.

Ranks that train together end their steps together, so their steps' times tell nothing. What a rank does between two exchanges does: it
computes, or waits for a processor; in an exchange it sleeps until the last one comes. The one that never sleeps is the last one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import NamedTuple

WINDOW_S = 10.0
IN_A_ROW = 3
"""Windows in which it is the same rank."""
TIMES = 1.5
"""How much more than the median of the others it has to work."""
LEAST = 0.3
"""And for at least this share of the time."""


class Straggler(NamedTuple):
    """A rank that the others wait for."""

    rank: int
    share: float
    """Of the time in which it worked, or waited for a processor."""
    others: float
    """The same, of the others' median."""


class Stragglers:
    """Told now and then how long each rank has worked since it began."""

    def __init__(self) -> None:
        self._since: tuple[float, dict[int, float]] | None = None
        self._found: deque[int | None] = deque(maxlen=IN_A_ROW)
        self.now: Straggler | None = None
        """Who it is, as long as it is."""

    def update(self, now: float, busy_s: Mapping[int, float]) -> Straggler | None:
        """One that was found just now; None if nobody was, or it is known already."""
        if self._since is None or set(self._since[1]) != set(busy_s) or any(busy_s[rank] < then for rank, then in self._since[1].items()):
            self._since = (now, dict(busy_s))
            return None
        began, before = self._since
        if now - began < WINDOW_S or len(busy_s) < 2:
            return None
        self._since = (now, dict(busy_s))
        shares = {rank: (busy_s[rank] - before[rank]) / (now - began) for rank in busy_s}
        rank = max(shares, key=lambda one: shares[one])
        others = median(share for one, share in shares.items() if one != rank)
        holds_up = shares[rank] >= max(LEAST, TIMES * others)
        self._found.append(rank if holds_up else None)
        if len(self._found) < IN_A_ROW or set(self._found) != {rank}:
            self.now = self.now if rank in self._found and self.now is not None and self.now.rank == rank else None
            return None
        known = self.now is not None and self.now.rank == rank
        self.now = Straggler(rank, shares[rank], others)
        return None if known else self.now
