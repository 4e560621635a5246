"""Who wants the save that a rank is asked for: told beside its page by whoever watches over it, taken once, by the save it is for."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

ASKED_FOR = "asked for by "
"""What the reason of such a save begins with."""
_BYTES_MAX = 1024


def asked_of(page: str | os.PathLike[str]) -> Path:
    """Where it is told, given the rank's page."""
    return Path(f"{os.fspath(page)}.asked")


def tell_asked(page: str | os.PathLike[str], who: str) -> None:
    """In place of what was told before; without ``who`` there is nothing to take. Without room for it the save does not name anybody."""
    path = asked_of(page)
    with contextlib.suppress(OSError):
        if not who:
            path.unlink(missing_ok=True)
            return
        new = path.with_name(f"{path.name}.new")
        new.write_bytes(who.encode("utf-8", "replace")[:_BYTES_MAX])
        new.replace(path)


def take_asked(page: str | os.PathLike[str]) -> str:
    """Who it was, and from now on nobody; empty without a page, or if nobody said."""
    if not page:
        return ""
    path = asked_of(page)
    try:
        with path.open("rb") as file:
            who = file.read(_BYTES_MAX)
        path.unlink()
    except OSError:
        return ""
    return "".join(one for one in who.decode("utf-8", "replace") if one.isprintable())
