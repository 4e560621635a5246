"""A warning that a node may fail, from the supervisor to the node's ranks: one small file in memory, replaced as a
whole."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

_BYTES_MAX = 4096
_WHY_MAX = 200


class RiskWarning(NamedTuple):
    """A warning of a failure. Times are seconds of the monotonic clock, which all processes of a machine share."""

    at: float
    likely: float
    """From 0 to 1: the share of such warnings that come true."""
    within_s: float
    """Seconds within which the failure occurs, if it does."""
    why: str = ""

    def remaining(self, now: float) -> float:
        """Return the remaining likelihood at ``now``: it falls linearly, to 0 after ``within_s``."""
        return self.likely * max(0.0, 1.0 - max(0.0, now - self.at) / self.within_s)


def risk_path(page: str | os.PathLike[str]) -> Path:
    """Return the file of the warning, next to any rank's page."""
    return Path(page).with_name("risk")


def write_risk(page: str | os.PathLike[str], warned: RiskWarning) -> None:
    """Replace the last warning unless that one still has a higher likelihood. Raise ``OSError`` if there is no space."""
    before = read_risk(page)
    if before is not None and before.remaining(warned.at) > warned.likely:
        return
    path = risk_path(page)
    new = path.with_name("risk.new")
    new.write_text(json.dumps(warned._replace(why=warned.why[:_WHY_MAX])))
    new.replace(path)


def read_risk(page: str | os.PathLike[str]) -> RiskWarning | None:
    """Return the last warning; None if there is none, or it is invalid. Costs a few microseconds."""
    try:
        with open(risk_path(page), "rb") as file:
            issued_at, likely, within_s, why = json.loads(file.read(_BYTES_MAX))
        warning = RiskWarning(float(issued_at), float(likely), float(within_s), str(why))
    except (OSError, ValueError, TypeError, RecursionError, OverflowError):
        return None
    return (
        warning
        if 0 <= warning.likely <= 1 and 0 < warning.within_s < float("inf") and abs(warning.at) < float("inf")
        else None
    )
