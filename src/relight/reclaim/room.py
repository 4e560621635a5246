"""A tier that has an end: a save that would not fit is held back while what a further tier lacks is being copied there."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from relight.catalog.holds import holds_of
from relight.log import History, Log, fold
from relight.policy import Keep, decide_keep
from relight.policy.keep import with_recorded
from relight.reclaim.prune import PruneReport, candidates_of, prune_a_share
from relight.store import ByteStore

_PAUSES_S = 0.2, 5.0
"""Between two looks at the log: the first pause, which doubles, and the longest."""


class _NoLonger(Exception):
    """Nobody is there any more for whom room is made."""


@dataclass(slots=True)
class SpaceGuard:
    """The room of one attempt's run in one tier. ``leads``: whether it may remove what is not needed there."""

    store: ByteStore
    run: str
    rules: Keep
    log: Log
    epoch: int
    verified: dict[str, bool] = field(default_factory=dict)

    def wait(self, need: int, leads: bool, until: float, still: Callable[[], bool], tell: Callable[[str, float], None]) -> float:
        """Return when ``need`` more bytes fit into the capacity, when waiting would be of no use, when ``still`` says False, or at
        ``until`` (of ``time.monotonic``): the save is then made all the same, for a checkpoint too many is better than none. Seconds
        waited.

        What may go by the rules, with ``need`` of the capacity gone, is removed first. ``tell`` is called once, with why it waits and for
        how long at most. Raises what the log and retention raise. Cost, as long as there is room: one look at the log.
        """
        began, pause, told = time.monotonic(), _PAUSES_S[0], False
        while self._over(history := fold(self.log.read()), need) > 0:
            if leads and self._make(need):
                continue
            now = time.monotonic()
            if not self._comes_free(history, need) or now >= until or not still():
                break
            if not told:
                size = (self.rules.capacity or 0) / 1e9
                tell(f"the tier has room for {size:g} GB, and what is there is not further out yet", until - now)
                told = True
            _rest(min(pause, max(0.0, until - now)), still)
            pause = min(2 * pause, _PAUSES_S[1])
        return time.monotonic() - began if told else 0.0

    def prune(self, need: int = 0, still: Callable[[], bool] = lambda: True) -> PruneReport | None:
        """Remove what the rules no longer keep, or would not with ``need`` of the capacity gone; None, and nothing removed, if ``still``
        says False while a checkpoint that stays is being read. Raises as ``prune_a_share`` does."""

        def go_on(_: int) -> None:
            if not still():
                raise _NoLonger

        rules, log = self._less(need), self.log
        try:
            return prune_a_share(self.store, self.run, rules, verified=self.verified, log=log, epoch=self.epoch, progress=go_on)
        except _NoLonger:
            return None

    def _less(self, need: int) -> Keep:
        return self.rules if self.rules.capacity is None else replace(self.rules, capacity=max(0, self.rules.capacity - need))

    def _over(self, history: History, need: int) -> int:
        """By how many bytes too much there would be."""
        return sum(one.body.new_bytes for one in history.live) + need - self.rules.capacity if self.rules.capacity is not None else 0

    def _make(self, need: int) -> bool:
        """Remove what may go; whether anything went."""
        report = self.prune(need)
        return report is not None and bool(report.retired)

    def _comes_free(self, history: History, need: int) -> bool:
        """Whether there would be room if everything were where it is to go."""
        on_hold = holds_of(history)
        arrived = [
            one if one.id in on_hold or not one.held else replace(one, held="", elsewhere=one.held, verified=True)
            for one in candidates_of(history, self.verified)
        ]
        waits = any(one.held and one.id not in on_hold for one in candidates_of(history))
        rules = with_recorded(self._less(need), history.best_by)
        left = sum(one.bytes for one, verdict in zip(arrived, decide_keep(rules, arrived), strict=True) if verdict.keep)
        return waits and left + need <= (self.rules.capacity or 0)


def _rest(seconds: float, still: Callable[[], bool]) -> None:
    ends = time.monotonic() + seconds
    while (left := ends - time.monotonic()) > 0 and still():
        time.sleep(min(left, _PAUSES_S[0]))
