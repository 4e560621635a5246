"""Default options of a Checkpointer from ``relight.toml``. Keyword arguments override ``RELIGHT_*``, which overrides
the file."""

from __future__ import annotations

from dataclasses import fields
from enum import Enum
from typing import NamedTuple

from relight.observe import emit
from relight.policy import Compact, Keep, Limits, Peers, Tiers, Trigger, adaptive
from relight.policy.file_defaults import defaults_of
from relight.settings.file import checked, from_variables, take_environment
from relight.settings.registry import from_variable


class NotGiven(Enum):
    """Marks an option that the caller left out, where None means something."""

    NOT_GIVEN = "not given"

    def __repr__(self) -> str:
        return "<not given>"


NOT_GIVEN = NotGiven.NOT_GIVEN


class CheckpointerOptions(NamedTuple):
    """The caller's options that the file can also set. ``NOT_GIVEN`` marks a missing ``save`` or ``keep``, None any
    other missing option.

    ``save=None`` and ``keep=None`` are the caller's values, and the file does not change them: a job that must keep
    everything must not lose checkpoints because of a file in its working directory.
    """

    save: Trigger | NotGiven | None
    keep: Keep | NotGiven | None
    limits: Limits | None
    compact: Compact | bool | None
    peers: Peers | None
    background: bool | None
    takeover: str | None = None


_LEFT_OUT = {"save": NOT_GIVEN, "keep": NOT_GIVEN}
"""The value that marks a missing option; None for options that are not listed."""


class CompletedOptions(NamedTuple):
    """The options in effect: each is the caller's value, else the file's, else the default."""

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
    """Return the options with the file's values for those that the caller did not give.

    With ``tiers``, the file's ``keep`` is ignored, because each tier has its own. The file's ``peers`` are ignored if
    one rank writes for all, or if saves are not made in the background. If ``save`` is given nowhere, it is
    ``adaptive()``, so that a run without settings saves, too. ``tiers`` are the caller's. Without them, the file's
    tiers apply to the store and run in ``place``. ``place`` is None if an observer has moved the run, because
    copies of a moved run on tiers would be useless.
    """
    take_environment()
    file_options, path = checked("checkpoint", defaults_of)
    names = [field.name for field in fields(file_options) if field.name != "tiers"]
    from_file = {name: getattr(file_options, name) for name in names if getattr(given, name) is _LEFT_OUT.get(name)}
    by_variable = from_variable("checkpoint.background")
    if by_variable is not None:
        from_file.pop("background", None)
    if tiers:
        from_file.pop("keep", None)
    own = (
        file_options.tiers.tiers_of(*place)
        if file_options.tiers is not None and not tiers and place is not None
        else None
    )
    background = given.background if given.background is not None else from_file.get("background")
    if writer == "rank 0" or background is False or by_variable is False:
        from_file.pop("peers", None)
    from_file = {name: value for name, value in from_file.items() if value is not None}
    if from_file or own is not None:
        origins = [*([str(path)] if path.exists() else []), *from_variables("checkpoint").values()]
        names = [*from_file, *(["tiers"] if own is not None else [])]
        emit("settings.read", f"{', '.join(names)} from {', '.join(origins)}", path=str(path), names=names)
    options = {**given._asdict(), **from_file, "tiers": own if not isinstance(tiers, Tiers) else tiers}
    options["save"] = adaptive() if options["save"] is NOT_GIVEN else options["save"]
    options["keep"] = None if options["keep"] is NOT_GIVEN else options["keep"]
    return CompletedOptions(**options)
