"""Record the script, its bytes, and the settings of a drill. A drill of another script or other settings shows nothing about a run."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from relight.drill.target import DrillTarget
from relight.errors import ConfigError
from relight.observe.masking import mask_arguments
from relight.settings.marks import OF_RECOVERY, changed, marks

_BYTES_MAX = 64 << 20


class MadeOf(msgspec.Struct, frozen=True, omit_defaults=True):
    """The script and settings of a drill. ``script`` is empty for the drill's own job."""

    script: tuple[str, ...] = ()
    """The script and its arguments, secrets masked."""
    path: str = ""
    digest: str = ""
    """Hash of the script's file; empty if it could not be read."""
    settings: dict[str, str] = {}
    """Marks of the settings that were set."""


def made_of(target: DrillTarget) -> MadeOf:
    """Return the script and settings of a target. Called before the drill, which takes long: the script may change meanwhile."""
    settings = _settings(Path(target.settings) if target.settings else None)
    if target.built_in:
        return MadeOf(settings=settings)
    module = "-m" in target.flags or "--module" in target.flags
    return of_script(target.script, Path.cwd(), settings=settings, module=module)


def of_script(
    script: Sequence[str], folder: Path, *, settings: dict[str, str] | None = None, module: bool = False
) -> MadeOf:
    """Return the description of a script that runs in ``folder``."""
    if not script:
        return MadeOf(settings=_settings(None) if settings is None else settings)
    name = f"{script[0].replace('.', '/')}.py" if module else script[0]
    path = str(folder / name)
    return MadeOf(
        tuple(mask_arguments(list(script)))[:100],
        path,
        digest_of(path),
        _settings(None) if settings is None else settings,
    )


def why_not(made: MadeOf | None, settings: dict[str, str] | None = None) -> tuple[str, str]:
    """Return why a drill no longer counts here: ``("no", reason)``, ``("unknown", reason)``, or two empty texts if it counts.

    ``settings``: the present marks of the settings, if the caller has them already.
    """
    if made is None:
        return "no", "it is older than the recording of scripts and settings"
    if not made.script:
        return "no", "it drilled the drill's own job, which shows nothing about this run's script"
    now = digest_of(made.path)
    if made.digest and now and now != made.digest:
        return "no", f"{os.path.basename(made.path)} has changed since"
    others = changed(made.settings, _settings(None) if settings is None else settings)
    if others:
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        return "no", f"it ran with another value of {others[0]}{more}"
    if not now or not made.digest:
        return "unknown", f"{made.path} cannot be read here, so it may have changed"
    return "", ""


def digest_of(path: str) -> str:
    """Return the hash of a file; "" if it cannot be read, or is too large for a script."""
    try:
        with open(path, "rb") as file:
            data = file.read(_BYTES_MAX + 1)
    except (OSError, ValueError):
        return ""
    return hashlib.blake2b(data, digest_size=16).hexdigest() if len(data) <= _BYTES_MAX else ""


def _settings(path: Path | None) -> dict[str, str]:
    try:
        return {name: mark for name, mark in marks(path).items() if name.startswith(OF_RECOVERY)}
    except ConfigError:
        return {}
