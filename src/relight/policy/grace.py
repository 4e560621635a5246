"""Whether a save still fits into the grace period, between the signal that ends a job and the end of its machine.
Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from relight.settings.supervise_settings import GRACE_VARIABLE
from relight.units import duration_text

GRACE = GRACE_VARIABLE
"""Variable with the seconds that a process has from SIGTERM to SIGKILL."""
_SHARE, _LEAST_S, _MOST_S = 0.1, 0.4, 1.5
_DEAR = 1.1
"""Safety factor: a save may take this many times as long as earlier ones."""


def kept_back(grace_s: float) -> float:
    """Return the seconds of the grace period that the supervisor reserves: to kill ranks that do not end, to write the
    incident, and to exit with a code."""
    return min(_MOST_S, max(_LEAST_S, _SHARE * grace_s))


def grace_of(text: str) -> float | None:
    """Return the seconds in ``text``; None if it is not a finite number above 0."""
    try:
        grace_s = float(text)
    except ValueError:
        return None
    return grace_s if 0 < grace_s < float("inf") else None


class Fit(NamedTuple):
    """Decision whether to save, and its reason."""

    fits: bool
    why: str


@dataclass(frozen=True, slots=True)
class GraceState:
    """Facts that one rank has when it must end."""

    left_s: float | None
    """Seconds until the rank must have ended; None: unknown."""
    usual_s: float
    """Seconds of the longest of its last saves; 0: there was none."""
    before: float
    """Writing that must finish first, for saves that were started, in units of one save."""

    @property
    def need_s(self) -> float:
        """Estimated seconds of a save that starts now."""
        return _DEAR * self.usual_s * (1.0 + self.before)


def fits(ranks: Sequence[GraceState]) -> Fit:
    """Return whether all ranks have time for a save: the slowest rank must fit into the shortest time left. If nothing
    is known, try the save: a failed one leaves the previous checkpoint intact."""
    left = min((rank.left_s for rank in ranks if rank.left_s is not None), default=None)
    need = max(rank.need_s for rank in ranks)
    if left is None:
        return Fit(True, "the time left is unknown")
    if not need:
        return Fit(left > 0, f"{duration_text(max(0.0, left))} are left, and no save has shown yet how long one takes")
    return Fit(need <= left, f"a save takes {duration_text(need)}, and {duration_text(max(0.0, left))} are left")
