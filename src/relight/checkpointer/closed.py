"""End of a Checkpointer: what ended it, at which step, and when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import monotonic
from typing import NamedTuple

from relight.errors import ConfigError, Fenced
from relight.units import age_text


class RunEnd(NamedTuple):
    """How a run ended on this rank: its last step, and ids of the checkpoints that each further tier lacks. Only rank 0
    knows the tiers. Tiers of one group (several places, and a quorum) lack what fewer of them than the quorum have.

    ``unsaved``: no checkpoint has the last step: each save of it failed, or was not durable within the deadline or the
    grace period."""

    step: int | None
    missing: Mapping[str, Sequence[str]]
    unsaved: bool = False

    @property
    def exit_code(self) -> int:
        """0, or 1 if the last step is unsaved or a tier lacks a checkpoint: ``sys.exit(ckpt.close().exit_code)``."""
        return 1 if self.missing or self.unsaved else 0


class Closed(NamedTuple):
    """The end of a Checkpointer. ``superseded``: another Checkpointer has the run now, so this process must not create
    a new one."""

    why: str
    step: int | None
    at: float
    superseded: bool = False
    saves: bool = True
    """Whether ``close()`` had to save the last step."""

    @classmethod
    def now(cls, why: str, step: int | None, *, superseded: bool = False, saves: bool = True) -> Closed:
        """Return the end that happens now, after ``step``."""
        return cls(why, step, monotonic(), superseded, saves)

    def refuse(self, run: str) -> None:
        """Raise the error for a call after the end."""
        after = "before its first step" if self.step is None else f"after step {self.step}"
        message = f"this Checkpointer was closed before this call: {self.why} {after}, {age_text(max(0.0, monotonic() - self.at))}"
        if self.superseded:
            hint = "use the newer Checkpointer; in a notebook, run the cell again that makes it and calls restore()"
            raise Fenced(message, where=run, hint=hint)
        raise ConfigError(message, where=run, hint="to train further, make a new Checkpointer and call its restore()")
