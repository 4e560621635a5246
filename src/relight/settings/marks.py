"""Marks of the settings that are set: two marks are equal if the values are equal. A value cannot be read from its
mark."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from relight.settings.environment import text_of
from relight.settings.error_location import value_at
from relight.settings.file import parse, read_text, value_of, was_taken, which_file
from relight.settings.registry import Setting, settings_by_name

SECRET = "set"  # noqa: S105 - a word, not a secret
"""The mark of every secret: a short secret could be guessed from a digest."""
OF_RECOVERY = ("checkpoint.", "supervise.")
"""The tables with settings of a job's recovery."""


def marks(path: Path | None = None) -> dict[str, str]:
    """Return the mark of each setting that a variable or the file sets. ``path``: read this file instead of the one in
    effect.

    ``ConfigError`` for a file that is not TOML. Cost: one small file.
    """
    file, _ = which_file(path)
    table = parse(read_text(file), file) if os.path.lexists(file) else {}
    values = {setting.name: _value(setting, table) for setting in settings_by_name().values()}
    return {name: _mark(settings_by_name()[name], value) for name, value in values.items() if value is not None}


def changed(before: dict[str, str], now: dict[str, str], tables: tuple[str, ...] = OF_RECOVERY) -> list[str]:
    """Return the names of settings in these tables with different marks. Pure."""
    names = sorted({*before, *now})
    return [name for name in names if name.startswith(tables) and before.get(name) != now.get(name)]


def _value(setting: Setting, table: dict[str, Any]) -> Any:
    text = text_of(setting.variable)
    if text and not was_taken(setting.variable):
        return text if setting.name.startswith("environment.") else value_of(text)
    return value_at(table, tuple(setting.name.split(".")))


def _mark(setting: Setting, value: Any) -> str:
    if setting.secret:
        return SECRET if value not in ("", [], None) else ""
    return hashlib.blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()
