"""What is foreseen of a node, told by whoever watches over it to the ranks there: one small file of memory, replaced as a whole."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

_BYTES_MAX = 4096
_WHY_MAX = 200


class RiskWarning(NamedTuple):
    """That something may fail here. Times are seconds of the monotonic clock, which processes of a machine have in common."""

    at: float
    likely: float
    """From 0 to 1: the share of such warnings that come true."""
    within_s: float
    """So soon they do, if at all."""
    why: str = ""

    def remaining(self, now: float) -> float:
        """What is left of it: it fades evenly, and is nothing once it is over."""
        return self.likely * max(0.0, 1.0 - max(0.0, now - self.at) / self.within_s)


def risk_path(page: str | os.PathLike[str]) -> Path:
    """Where it is told, given any rank's page: beside it."""
    return Path(page).with_name("risk")


def write_risk(page: str | os.PathLike[str], warned: RiskWarning) -> None:
    """In place of what was told before, unless more is left of that. ``OSError`` if there is no room for it."""
    before = read_risk(page)
    if before is not None and before.remaining(warned.at) > warned.likely:
        return
    path = risk_path(page)
    new = path.with_name("risk.new")
    new.write_text(json.dumps(warned._replace(why=warned.why[:_WHY_MAX])))
    new.replace(path)


def read_risk(page: str | os.PathLike[str]) -> RiskWarning | None:
    """What was told last; None if nothing was, or nothing that makes sense. A few microseconds."""
    try:
        with open(risk_path(page), "rb") as file:
            at, likely, within_s, why = json.loads(file.read(_BYTES_MAX))
        found = RiskWarning(float(at), float(likely), float(within_s), str(why))
    except (OSError, ValueError, TypeError, RecursionError, OverflowError):
        return None
    return found if 0 <= found.likely <= 1 and 0 < found.within_s < float("inf") and abs(found.at) < float("inf") else None
