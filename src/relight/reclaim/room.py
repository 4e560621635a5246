"""Capacity of a tier: delay a save that would not fit while checkpoints are being copied to a further tier."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from relight.log import History, Log, fold
from relight.policy import Keep, decide_keep
from relight.policy.keep import with_recorded
from relight.reclaim.prune import PruneReport, candidates_of, prune_a_share
from relight.run_records.holds import holds_of
from relight.store import ByteStore
from relight.units import size_text

_PAUSES_S = 0.2, 5.0
"""Seconds between two polls of the log: the first pause, which doubles, and the longest."""


class _NoLonger(Exception):
    """The caller's ``still()`` returned False: the space is no longer needed."""


@dataclass(slots=True)
class SpaceGuard:
    """Capacity of one tier for one attempt's run."""

    store: ByteStore
    run: str
    rules: Keep
    log: Log
    epoch: int
    verified: dict[str, bool] = field(default_factory=dict)

    def wait(
        self, need: int, leads: bool, until: float, still: Callable[[], bool], on_wait: Callable[[str, float], None]
    ) -> float:
        """Wait until ``need`` more bytes fit into the capacity. Return the seconds waited.

        Also return when waiting cannot help, when ``still()`` is False, or at ``until`` (of ``time.monotonic``). The caller then saves all
        the same: one checkpoint too many is better than none. If ``leads``, checkpoints that the rules would drop with ``need`` bytes less
        capacity are removed first. ``on_wait`` is called once, with the reason and the longest wait in seconds. Raises what the log and
        retention raise. Cost while there is room: one read of the log's newest records.
        """
        began, pause, reported = time.monotonic(), _PAUSES_S[0], False
        while self._over(history := fold(self.log.read()), need) > 0:
            if leads and self._make(need):
                continue
            now = time.monotonic()
            if not self._comes_free(history, need) or now >= until or not still():
                break
            if not reported:
                size = size_text(self.rules.capacity or 0)
                on_wait(
                    f"the tier's capacity is {size}, and its checkpoints are not copied to a further tier yet",
                    until - now,
                )
                reported = True
            _rest(min(pause, max(0.0, until - now)), still)
            pause = min(2 * pause, _PAUSES_S[1])
        return time.monotonic() - began if reported else 0.0

    def prune(self, need: int = 0, still: Callable[[], bool] = lambda: True) -> PruneReport | None:
        """Remove what the rules would drop with ``need`` bytes less capacity.

        Return None, with nothing removed, if ``still()`` returns False while a checkpoint that stays is read. Raises as ``prune_a_share``.
        """

        def check_still(_: int) -> None:
            if not still():
                raise _NoLonger

        rules, log = self._less(need), self.log
        try:
            return prune_a_share(
                self.store, self.run, rules, verified=self.verified, log=log, epoch=self.epoch, progress=check_still
            )
        except _NoLonger:
            return None

    def _less(self, need: int) -> Keep:
        return (
            self.rules
            if self.rules.capacity is None
            else replace(self.rules, capacity=max(0, self.rules.capacity - need))
        )

    def _over(self, history: History, need: int) -> int:
        """Return the bytes beyond the capacity after ``need`` more bytes; 0 without a capacity."""
        return (
            sum(checkpoint.new_bytes for checkpoint in history.live) + need - self.rules.capacity
            if self.rules.capacity is not None
            else 0
        )

    def _make(self, need: int) -> bool:
        """Remove what may go. Return whether anything was retired."""
        report = self.prune(need)
        return report is not None and bool(report.retired)

    def _comes_free(self, history: History, need: int) -> bool:
        """Return whether copies are pending and ``need`` would fit once they have arrived in the further tiers."""
        on_hold = holds_of(history)
        arrived = [
            candidate
            if candidate.id in on_hold or not candidate.held
            else replace(candidate, held="", elsewhere=candidate.held, verified=True)
            for candidate in candidates_of(history, self.verified)
        ]
        waits = any(candidate.held and candidate.id not in on_hold for candidate in candidates_of(history))
        rules = with_recorded(self._less(need), history.best_by)
        left = sum(
            candidate.bytes
            for candidate, verdict in zip(arrived, decide_keep(rules, arrived), strict=True)
            if verdict.keep
        )
        return waits and left + need <= (self.rules.capacity or 0)


def _rest(seconds: float, still: Callable[[], bool]) -> None:
    ends = time.monotonic() + seconds
    while (left := ends - time.monotonic()) > 0 and still():
        time.sleep(min(left, _PAUSES_S[0]))
