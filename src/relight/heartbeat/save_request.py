"""The reason of a save that a signal requests: the supervisor writes it next to the rank's page, and the save takes
it, once."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

ASKED_FOR = "asked for by "
"""Start of the reason of such a save."""
FORESEEN = "preventive: "
"""Start of the reason of a save that ``relight run`` requests because of an alarm; the alarm's text follows."""
_BYTES_MAX = 1024


def request_path(page: str | os.PathLike[str]) -> Path:
    """Return the file of the reason, given the rank's page."""
    return Path(f"{os.fspath(page)}.asked")


def write_request(page: str | os.PathLike[str], reason: str) -> None:
    """Write the next save's reason in place of an earlier one; remove it if ``reason`` is empty.

    Without disk space the save's reason is only its signal.
    """
    path = request_path(page)
    with contextlib.suppress(OSError):
        if not reason:
            path.unlink(missing_ok=True)
            return
        new = path.with_name(f"{path.name}.new")
        new.write_bytes(reason.encode("utf-8", "replace")[:_BYTES_MAX])
        new.replace(path)


def take_request(page: str | os.PathLike[str]) -> str:
    """Return the reason and remove it; empty without a page, or if there is none."""
    if not page:
        return ""
    path = request_path(page)
    try:
        with path.open("rb") as file:
            reason = file.read(_BYTES_MAX)
        path.unlink()
    except OSError:
        return ""
    return "".join(character for character in reason.decode("utf-8", "replace") if character.isprintable())
