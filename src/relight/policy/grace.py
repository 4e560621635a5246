"""Whether a save still fits between the signal that a job is to end and the end of its machine. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

GRACE = "RELIGHT_GRACE_S"
"""How long a process has from SIGTERM to SIGKILL, in seconds."""
_SHARE, _LEAST_S, _MOST_S = 0.1, 0.4, 1.5
_DEAR = 1.1
"""A save may take so many times as long as those before it."""


def kept_back(grace_s: float) -> float:
    """So much of it a supervisor keeps for itself: to end who does not end, for the incident, for an exit code."""
    return min(_MOST_S, max(_LEAST_S, _SHARE * grace_s))


def grace_of(text: str) -> float | None:
    """What the environment says; None if nothing, or nothing that is a time."""
    try:
        grace_s = float(text)
    except ValueError:
        return None
    return grace_s if 0 < grace_s < float("inf") else None


class Fit(NamedTuple):
    """Whether to save, and why."""

    fits: bool
    why: str


@dataclass(frozen=True, slots=True)
class GraceState:
    """What one rank knows when it is to end."""

    left_s: float | None
    """Until it must have ended; None: nobody has said."""
    usual_s: float
    """The longest of its last saves; 0: there was none."""
    before: float
    """How many saves' worth of writing must be done first, by those that were begun."""

    @property
    def need_s(self) -> float:
        """How long a save takes that is begun now."""
        return _DEAR * self.usual_s * (1.0 + self.before)


def fits(ranks: Sequence[GraceState]) -> Fit:
    """Of all ranks together: the slowest counts, and whoever has least time. Where nothing is known it is tried, as the last one stands."""
    left = min((one.left_s for one in ranks if one.left_s is not None), default=None)
    need = max(one.need_s for one in ranks)
    if left is None:
        return Fit(True, "nobody has said how long there is")
    if not need:
        return Fit(left > 0, f"{max(0.0, left):.1f} s are left, and no save has shown yet how long one takes")
    return Fit(need <= left, f"a save takes {need:.1f} s, and {max(0.0, left):.1f} s are left")
