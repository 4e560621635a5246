"""What to do when a save fails: warn and go on, retry, or raise, as ``on_failure=`` says."""

from __future__ import annotations

from dataclasses import dataclass

from relight.errors import ConfigError, RelightError, SaveFailed
from relight.observe import emit


@dataclass(frozen=True, slots=True)
class Failures:
    """Try a failed save ``retries`` times more; after ``raise_after`` failed saves in a row raise, None for never."""

    retries: int = 0
    raise_after: int | None = None

    def tell(self, error: Exception, step: int, turn: int) -> RelightError:
        """Say that the save at ``step`` has failed at try ``turn``, and what comes next; the error as one of ours."""
        known = error if isinstance(error, RelightError) else SaveFailed(f"{type(error).__name__}: {error}", where=f"step {step}")
        if known is not error:
            known.__cause__ = error
        ahead = "trying again" if turn < self.retries else "training goes on; the next save will be tried as usual"
        emit("save.failed", f"the save at step {step} failed: {known}\n  {ahead}", step=step, kind=known.kind, turn=turn)
        return known


def failures(*, retries: int = 0, raise_after: int | None = None) -> Failures:
    """The policy for ``Checkpointer(on_failure=…)``: how often to try again at once, and after how many failed saves in a row to raise."""
    if not isinstance(retries, int) or not 0 <= retries <= 100:
        raise ConfigError(f"retries is a whole number from 0 to 100, not {retries!r}")
    if raise_after is not None and (not isinstance(raise_after, int) or raise_after < 1):
        raise ConfigError(f"raise_after is a whole number from 1 up, or None, not {raise_after!r}")
    return Failures(retries, raise_after)


def check_failures(value: str | Failures) -> Failures:
    """``warn``, ``retry``, ``raise`` or a policy as a policy."""
    named = {"warn": Failures(), "retry": Failures(retries=2), "raise": Failures(raise_after=1)}
    if isinstance(value, Failures):
        return value
    if value in named:
        return named[value]
    raise ConfigError(
        f"on_failure= takes 'warn', 'retry', 'raise' or relight.failures(…), not {value!r}",
        hint="'warn' goes on training, 'retry' tries twice more first, 'raise' stops",
    )
