"""Between the signal that a job is to end and the end of its machine: how long there is, and whether a save still fits."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from time import monotonic

import msgspec

from relight.checkpointer.ranks import Ranks
from relight.checkpointer.save_handle import Save
from relight.checkpointer.signals import ENDS
from relight.comm import RankTimeout
from relight.decode import from_json_bytes
from relight.errors import StoreUnavailable
from relight.observe import emit
from relight.policy.grace import GRACE, GraceState, fits, grace_of

_REMEMBERED = 4
_OUTLIVED_S = 10.0
"""Seconds past the announced end after which a process that still runs plans without it."""


class GracePeriod:
    """Of one Checkpointer. Where nobody says how long there is (``RELIGHT_GRACE_S``), there is all the time that is needed."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock, self._grace_s = clock, grace_of(os.environ.get(GRACE, ""))
        self._ends: float | None = None
        self._closes: float | None = None
        self._took: deque[float] = deque(maxlen=_REMEMBERED)

    def begin(self) -> None:
        """A signal to end has come; the first counts."""
        if self._ends is None and self._grace_s is not None:
            self._ends = self._clock() + self._grace_s

    def on_signal(self, name: str) -> None:
        """Begin, if that signal ends the job."""
        if name in ENDS:
            self.begin()

    def learn(self, timings: Mapping[str, float]) -> None:
        """Of a save that became durable: not what it waited for those before it."""
        self._took.append(sum(timings.get(name, 0.0) for name in ("blocked", "copy", "total")))

    @property
    def left_s(self) -> float | None:
        """Until this process must have ended; None: for ever, or nobody knows."""
        left = None if self._ends is None else self._ends - self._clock()
        return None if left is None or left < -_OUTLIVED_S else left

    @property
    def over(self) -> bool:
        """Whether there is no time any more."""
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
        """The seconds that a wait may take: ``seconds``, or what is left of the grace or of ``close()``, whichever is least."""
        left = [seconds, *([] if self.left_s is None else [self.left_s])]
        return max(0.0, min([*left, *([] if self._closes is None else [self._closes - self._clock()])]))

    def allow(self, step: int, begun: Iterable[Save], ranks: Ranks | None) -> bool:
        """Whether to save the step that the job ends behind: the same on all ranks, who each ask at this point. Tells if not."""
        self.begin()
        before = sum(1.0 - save.progress.written for save in begun if not save.done and save.error is None)
        mine = GraceState(self.left_s, max(self._took, default=0.0), before)
        try:
            told = ranks.world.gather(msgspec.json.encode(mine), "ending") if ranks is not None else []
        except RankTimeout:  # which the save will say
            return True
        fit = fits([from_json_bytes(one, GraceState) for one in told] or [mine])
        if not fit.fits:
            emit("save.skipped_no_time", f"step {step} is not saved, the checkpoint before it stands: {fit.why}", step=step)
        return fit.fits


def never_in_time(step: int, reason: str) -> Save:
    """Report a save for which no time is left, as those before it took all of it. Return its handle, which has the error."""
    save = Save(step, reason)
    save.error = StoreUnavailable("not begun: the grace of the signal is over", where=f"step {step}")
    emit("save.skipped_no_time", f"step {step} is not saved, the checkpoint before it stands: no time is left", step=step)
    return save
