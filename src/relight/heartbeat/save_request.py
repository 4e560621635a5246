"""Who wants the save that a rank is asked for: told beside its page by whoever watches over it, taken once, by the save it is for."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

ASKED_FOR = "asked for by "
"""What the reason of such a save begins with."""
FORESEEN = "preventive: "
"""The start of the reason of a save that ``relight run`` orders because of an alarm; the alarm's words follow."""
_BYTES_MAX = 1024


def request_path(page: str | os.PathLike[str]) -> Path:
    """Where it is told, given the rank's page."""
    return Path(f"{os.fspath(page)}.asked")


def write_request(page: str | os.PathLike[str], reason: str) -> None:
    """Leave the next save's reason, in place of an earlier one; none if ``reason`` is empty. Without room on the disk the save names its
    signal only."""
    path = request_path(page)
    with contextlib.suppress(OSError):
        if not reason:
            path.unlink(missing_ok=True)
            return
        new = path.with_name(f"{path.name}.new")
        new.write_bytes(reason.encode("utf-8", "replace")[:_BYTES_MAX])
        new.replace(path)


def take_request(page: str | os.PathLike[str]) -> str:
    """Take the reason that was left, once; empty without a page, or if there is none."""
    if not page:
        return ""
    path = request_path(page)
    try:
        with path.open("rb") as file:
            reason = file.read(_BYTES_MAX)
        path.unlink()
    except OSError:
        return ""
    return "".join(one for one in reason.decode("utf-8", "replace") if one.isprintable())
