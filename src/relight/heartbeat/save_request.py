"""The reason of a save that a signal requests: the supervisor writes it next to the rank's page, and the save takes
it, once."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from relight.decode import from_msgpack
from relight.save_reason import SaveReason

_TEXT_MAX, _BYTES_MAX = 500, 4096


def request_path(page: str | os.PathLike[str]) -> Path:
    """Return the file of the reason, given the rank's page."""
    return Path(f"{os.fspath(page)}.asked")


def write_request(page: str | os.PathLike[str], reason: SaveReason | None) -> None:
    """Write the next save's reason in place of an earlier one; remove it if ``reason`` is None. At most 500 characters of its text count.

    Without disk space the save's reason is only its signal.
    """
    path = request_path(page)
    with contextlib.suppress(OSError):
        if reason is None:
            path.unlink(missing_ok=True)
            return
        new = path.with_name(f"{path.name}.new")
        text = reason.text.encode("utf-8", "replace").decode()[:_TEXT_MAX]
        new.write_bytes(msgspec.msgpack.encode(msgspec.structs.replace(reason, text=text)))
        new.replace(path)


def take_request(page: str | os.PathLike[str]) -> SaveReason | None:
    """Return the reason, with a printable text, and remove it. None without a page, or if there is no valid reason."""
    if not page:
        return None
    path = request_path(page)
    try:
        with path.open("rb") as file:
            data = file.read(_BYTES_MAX)
        path.unlink()
        reason = from_msgpack(data, SaveReason)
    except (OSError, msgspec.MsgspecError):
        return None
    return msgspec.structs.replace(
        reason, text="".join(character for character in reason.text if character.isprintable())
    )
