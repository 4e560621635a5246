"""Grace period, from the signal that ends a job until its machine stops: how much time is left, and whether a save
still fits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from time import monotonic

import msgspec

from relight.checkpointer.hooks import CommittedSave, Hook
from relight.checkpointer.save_handle import Save
from relight.comm import RankTimeout
from relight.decode import from_json_bytes
from relight.errors import StoreUnavailable
from relight.observe import emit
from relight.policy.grace import GRACE, GraceState, fits, grace_of
from relight.ranks.group import RankGroup
from relight.save_reason import ENDING_SIGNALS, SaveReason
from relight.settings.environment import text_of

_REMEMBERED = 4
_OUTLIVED_S = 10.0
"""Seconds past the announced end after which a process that still runs plans without it."""


class GracePeriod(Hook):
    """Grace period of one Checkpointer. Without ``RELIGHT_GRACE_S`` it is unlimited."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock, self._grace_s = clock, grace_of(text_of(GRACE))
        self._ends: float | None = None
        self._closes: float | None = None
        self._took: deque[float] = deque(maxlen=_REMEMBERED)

    def begin(self) -> None:
        """Start the grace period at the first signal that ends the job. Later calls change nothing."""
        if self._ends is None and self._grace_s is not None:
            self._ends = self._clock() + self._grace_s

    def on_signal(self, name: str) -> None:
        """Start the grace period if the signal ``name`` ends the job."""
        if name in ENDING_SIGNALS:
            self.begin()

    def on_durable(self, done: CommittedSave) -> None:
        """Record what the save took."""
        self.learn(done.timings)

    def learn(self, timings: Mapping[str, float]) -> None:
        """Record the seconds that a durable save took, without its wait for earlier saves."""
        self._took.append(sum(timings.get(name, 0.0) for name in ("blocked", "copy", "total")))

    @property
    def left_s(self) -> float | None:
        """Seconds until this process must have ended; None: unlimited or unknown."""
        seconds_left = None if self._ends is None else self._ends - self._clock()
        return None if seconds_left is None or seconds_left < -_OUTLIVED_S else seconds_left

    @property
    def over(self) -> bool:
        """Whether no time is left."""
        return self.left_s is not None and self.left_s <= 0

    def closing(self, seconds: float) -> None:
        """Give all waits of ``close()`` together ``seconds`` from now; the first call counts."""
        if self._closes is None:
            self._closes = self._clock() + seconds

    @property
    def is_closing(self) -> bool:
        """Whether ``closing`` was called."""
        return self._closes is not None

    def bound(self, seconds: float) -> float:
        """Return the seconds that a wait may take: the least of ``seconds``, the rest of the grace period and the rest
        of ``close()``."""
        limits = [seconds, *([] if self.left_s is None else [self.left_s])]
        return max(0.0, min([*limits, *([] if self._closes is None else [self._closes - self._clock()])]))

    def allow(self, step: int, begun: Iterable[Save], ranks: RankGroup) -> bool:
        """Return whether to save the last step before the job ends, and report it if not. Collective: every rank gets
        the same answer."""
        self.begin()
        pending = sum(1.0 - save.progress.written for save in begun if not save.done and save.error is None)
        own_state = GraceState(self.left_s, max(self._took, default=0.0), pending)
        try:
            messages = ranks.world.gather(msgspec.json.encode(own_state), "ending")
        except RankTimeout:  # the save will report it
            return True
        fit = fits([from_json_bytes(message, GraceState) for message in messages])
        if not fit.fits:
            emit(
                "save.skipped_no_time",
                f"step {step} not saved: {fit.why}; the previous checkpoint remains the newest",
                step=step,
            )
        return fit.fits


def never_in_time(step: int, reason: SaveReason) -> Save:
    """Report a save for which earlier saves have left no time. Return its handle, which has the error."""
    save = Save(step, reason)
    save.error = StoreUnavailable("not started: the grace period is over", where=f"step {step}")
    emit(
        "save.skipped_no_time",
        f"step {step} not saved: no time is left; the previous checkpoint remains the newest",
        step=step,
    )
    return save
