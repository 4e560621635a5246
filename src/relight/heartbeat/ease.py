"""How much of the time ranks of a node pause, written by the supervisor to one small file of memory, which is replaced as a whole."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import NamedTuple

_BYTES_MAX = 1024
SHARE_MAX = 0.9


class Eased(NamedTuple):
    """A share of the time, from 0 to ``SHARE_MAX``. ``until``: seconds of the monotonic clock; the supervisor renews it while it holds."""

    share: float
    until: float


def ease_path(page: str | os.PathLike[str]) -> Path:
    """Return the file of a node, given any rank's page there."""
    return Path(page).with_name("ease")


def write_ease(page: str | os.PathLike[str], eased: Eased | None) -> None:
    """Replace what holds; None: ranks pause no more. ``OSError`` if there is no room for it."""
    path = ease_path(page)
    if eased is None:
        path.unlink(missing_ok=True)
        return
    new = path.with_name("ease.new")
    new.write_text(json.dumps(eased))
    new.replace(path)


def read_ease(page: str | os.PathLike[str]) -> Eased | None:
    """Return what was written last; None without a file, or if it is invalid. Costs a few microseconds."""
    with contextlib.suppress(OSError, ValueError, TypeError, RecursionError, OverflowError), open(ease_path(page), "rb") as file:
        share, until = json.loads(file.read(_BYTES_MAX))
        found = Eased(float(share), float(until))
        if 0 < found.share <= SHARE_MAX and abs(found.until) < float("inf"):
            return found
    return None
