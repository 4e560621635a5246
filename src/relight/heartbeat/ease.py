"""The share of the time that a node's ranks must pause. The supervisor writes it to one small file in memory, and
replaces the file as a whole."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import NamedTuple

_BYTES_MAX = 1024
SHARE_MAX = 0.9


class Eased(NamedTuple):
    """A share of the time, from 0 to ``SHARE_MAX``. ``until``: seconds of the monotonic clock; the supervisor renews
    it while the ranks must pause."""

    share: float
    until: float


def ease_path(page: str | os.PathLike[str]) -> Path:
    """Return the file of a node, given any rank's page there."""
    return Path(page).with_name("ease")


def write_ease(page: str | os.PathLike[str], eased: Eased | None) -> None:
    """Replace the present share. None: ranks no longer pause. Raise ``OSError`` if there is no space."""
    path = ease_path(page)
    if eased is None:
        path.unlink(missing_ok=True)
        return
    new = path.with_name("ease.new")
    new.write_text(json.dumps(eased))
    new.replace(path)


def read_ease(page: str | os.PathLike[str]) -> Eased | None:
    """Return the last share; None without a file, or if it is invalid. Costs a few microseconds."""
    with (
        contextlib.suppress(OSError, ValueError, TypeError, RecursionError, OverflowError),
        open(ease_path(page), "rb") as file,
    ):
        share, until = json.loads(file.read(_BYTES_MAX))
        eased = Eased(float(share), float(until))
        if 0 < eased.share <= SHARE_MAX and abs(eased.until) < float("inf"):
            return eased
    return None
