"""What a Checkpointer takes from ``relight.toml``: keyword arguments beat ``RELIGHT_*``, which beats the file."""

from __future__ import annotations

import os
from dataclasses import fields
from typing import NamedTuple

from relight.observe import emit
from relight.policy import Compact, Keep, Limits, Peers, Trigger
from relight.policy.table import defaults_of
from relight.settings.file import checked, from_variables, take_environment


class Given(NamedTuple):
    """The options that the file may have, as they were given; None: not at all."""

    save: Trigger | None
    keep: Keep | None
    limits: Limits | None
    compact: Compact | bool | None
    peers: Peers | None
    background: bool | None


def completed(given: Given, writer: str, tiers: bool) -> Given:
    """With what the file says of those that were not given. Where tiers say what each keeps, the file does not; nor are there peers where
    one rank writes, or where saves are not made in the background."""
    take_environment()
    told, path = checked("checkpoint", defaults_of)
    taken = {one.name: getattr(told, one.name) for one in fields(told) if getattr(given, one.name) is None}
    if os.environ.get("RELIGHT_BACKGROUND"):
        taken.pop("background", None)
    if tiers:
        taken.pop("keep", None)
    background = given.background if given.background is not None else taken.get("background")
    if writer == "rank 0" or background is False or os.environ.get("RELIGHT_BACKGROUND", "1").lower() in ("0", "false", "no"):
        taken.pop("peers", None)
    taken = {name: value for name, value in taken.items() if value is not None}
    if taken:
        sayers = [*([str(path)] if path.exists() else []), *from_variables("checkpoint").values()]
        emit("settings.read", f"{', '.join(taken)} as said by {', '.join(sayers)}", path=str(path), names=list(taken))
    return given._replace(**taken)
