"""What a Checkpointer takes from ``relight.toml``: keyword arguments beat ``RELIGHT_*``, which beats the file."""

from __future__ import annotations

import os
from dataclasses import fields
from enum import Enum
from typing import NamedTuple

from relight.observe import emit
from relight.policy import Compact, Keep, Limits, Peers, Tiers, Trigger, adaptive
from relight.policy.file_defaults import defaults_of
from relight.settings.file import checked, from_variables, take_environment


class NotGiven(Enum):
    """Marks an option that the caller left out, where None means something."""

    NOT_GIVEN = "not given"

    def __repr__(self) -> str:
        return "<not given>"


NOT_GIVEN = NotGiven.NOT_GIVEN


class CheckpointerOptions(NamedTuple):
    """The options that the file may have, as they were given. Left out: ``NOT_GIVEN`` for ``save`` and ``keep``, None for the others.

    ``save=None`` and ``keep=None`` are answers of the caller's, which the file does not change: a job that is to keep everything must
    not lose checkpoints to a file in its working directory.
    """

    save: Trigger | NotGiven | None
    keep: Keep | NotGiven | None
    limits: Limits | None
    compact: Compact | bool | None
    peers: Peers | None
    background: bool | None
    takeover: str | None = None


_LEFT_OUT = {"save": NOT_GIVEN, "keep": NOT_GIVEN}
"""What marks an option that was left out; None for the others."""


class CompletedOptions(NamedTuple):
    """The same options, each with what holds: the caller's, else the file's, else the default."""

    save: Trigger | None
    keep: Keep | None
    limits: Limits | None
    compact: Compact | bool | None
    peers: Peers | None
    background: bool | None
    takeover: str | None = None
    tiers: Tiers | None = None


def with_file_defaults(
    given: CheckpointerOptions, writer: str, tiers: Tiers | bool | None, place: tuple[str, str] | None = None
) -> CompletedOptions:
    """With what the file says of those that were not given. Where tiers say what each keeps, the file does not; nor are there peers where
    one rank writes, or where saves are not made in the background. Without ``save`` anywhere it is ``adaptive()``: a run that was
    not set up saves, too. ``tiers`` are the caller's. Without them the file's count for the store and run in ``place``; None if an observer
    has moved the run, so that copies of it would be junk."""
    take_environment()
    told, path = checked("checkpoint", defaults_of)
    names = [one.name for one in fields(told) if one.name != "tiers"]
    taken = {name: getattr(told, name) for name in names if getattr(given, name) is _LEFT_OUT.get(name)}
    if os.environ.get("RELIGHT_BACKGROUND"):
        taken.pop("background", None)
    if tiers:
        taken.pop("keep", None)
    own = told.tiers.tiers_of(*place) if told.tiers is not None and not tiers and place is not None else None
    background = given.background if given.background is not None else taken.get("background")
    if writer == "rank 0" or background is False or os.environ.get("RELIGHT_BACKGROUND", "1").lower() in ("0", "false", "no"):
        taken.pop("peers", None)
    taken = {name: value for name, value in taken.items() if value is not None}
    if taken or own is not None:
        sayers = [*([str(path)] if path.exists() else []), *from_variables("checkpoint").values()]
        names = [*taken, *(["tiers"] if own is not None else [])]
        emit("settings.read", f"{', '.join(names)} as said by {', '.join(sayers)}", path=str(path), names=names)
    found = {**given._asdict(), **taken, "tiers": own if not isinstance(tiers, Tiers) else tiers}
    found["save"] = adaptive() if found["save"] is NOT_GIVEN else found["save"]
    found["keep"] = None if found["keep"] is NOT_GIVEN else found["keep"]
    return CompletedOptions(**found)
