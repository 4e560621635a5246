"""Which settings are set here, each with a mark of its value: two marks are equal if the values are. No value can be read from a mark."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from relight.settings.error_location import value_at
from relight.settings.file import parse, read_text, value_of, was_taken, which_file
from relight.settings.registry import SETTINGS, Setting

SECRET = "set"  # noqa: S105 - a word, not a secret
"""The mark of a secret, whatever it is: a digest of a short one could be guessed."""
OF_RECOVERY = ("checkpoint.", "supervise.")
"""The tables by which a job recovers."""


def marks(path: Path | None = None) -> dict[str, str]:
    """Return the mark of each setting that a variable or the file sets. ``path``: in place of the file that counts here.

    ``ConfigError`` for a file that is not TOML. Cost: one small file.
    """
    file, _ = which_file(path)
    table = parse(read_text(file), file) if os.path.lexists(file) else {}
    found = {one.name: _value(one, table) for one in SETTINGS.values()}
    return {name: _mark(SETTINGS[name], value) for name, value in found.items() if value is not None}


def changed(before: dict[str, str], now: dict[str, str], tables: tuple[str, ...] = OF_RECOVERY) -> list[str]:
    """Return the names of settings of these tables whose marks differ. Pure."""
    names = sorted({*before, *now})
    return [name for name in names if name.startswith(tables) and before.get(name) != now.get(name)]


def _value(setting: Setting, table: dict[str, Any]) -> Any:
    text = os.environ.get(setting.variable, "")
    if text and not was_taken(setting.variable):
        return text if setting.name.startswith("environment.") else value_of(text)
    return value_at(table, tuple(setting.name.split(".")))


def _mark(setting: Setting, value: Any) -> str:
    if setting.secret:
        return SECRET if value not in ("", [], None) else ""
    return hashlib.blake2b(json.dumps(value, sort_keys=True, default=str).encode(), digest_size=8).hexdigest()
