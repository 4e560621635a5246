"""Value and source of each setting."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from relight.settings.environment import text_of
from relight.settings.error_location import Keys, value_at
from relight.settings.file import parse, read_text, value_of, was_given, was_taken
from relight.settings.lines import places
from relight.settings.registry import Setting, settings_by_name

HIDDEN = "set, hidden"


class Said(NamedTuple):
    """A value and its source: ``--set``, a variable, ``relight.toml:12``, ``default``."""

    value: Any
    source: str
    line: int = 0


class ShownSetting(NamedTuple):
    """A setting: the value in effect, and the values that it overrides."""

    setting: Setting
    counts: Said
    beaten: tuple[Said, ...]

    @property
    def is_set(self) -> bool:
        """Whether a file, a variable or an argument sets it."""
        return self.counts.source != "default"


def effective_settings(path: Path | None) -> list[ShownSetting]:
    """Return all settings, with the file at ``path`` (None: no file). Raise ``ConfigError`` if it is not valid TOML."""
    text = read_text(path) if path is not None else ""
    tables = parse(text, path) if path is not None else {}
    known = places(text)
    return [_shown(setting, path, tables, known) for setting in settings_by_name().values()]


def _shown(
    setting: Setting, path: Path | None, tables: dict[str, Any], known: dict[Keys, tuple[int, int]]
) -> ShownSetting:
    values = [*_by_variable(setting), *_by_file(setting, path, tables, known), Said(setting.default, "default")]
    return ShownSetting(setting, values[0], tuple(values[1:]))


def _by_variable(setting: Setting) -> Iterator[Said]:
    variable = setting.variable
    text = text_of(variable)
    if text and not was_taken(variable):
        plain = "__" not in variable
        yield Said(
            _shown_value(setting, text if plain else value_of(text)), "--set" if was_given(variable) else variable
        )


def _by_file(
    setting: Setting, path: Path | None, tables: dict[str, Any], known: dict[Keys, tuple[int, int]]
) -> Iterator[Said]:
    keys = tuple(setting.name.split("."))
    value = value_at(tables, keys)
    if (
        value is None
        and keys[:2] == ("alerts", "rules")
        and keys[3:] == ("enabled",)
        and value_at(tables, keys[:3]) is False
    ):
        value, keys = False, keys[:3]
    if value is not None:
        line = known.get(keys, (0, 0))[0]
        yield Said(_shown_value(setting, value), f"{path}:{line}" if line else str(path), line)


def _shown_value(setting: Setting, value: Any) -> Any:
    if setting.secret:
        return HIDDEN
    return _safe(value)


def _safe(value: Any) -> Any:
    """Return the value without user, password and query of a URL, which may contain a token."""
    if isinstance(value, str):
        return re.sub(r"\?\S*", "?…", re.sub(r"//[^/\s@]*@", "//…@", value)) if "://" in value else value
    if isinstance(value, list):
        return [_safe(element) for element in value]
    if isinstance(value, dict):
        return {name: _safe(element) for name, element in value.items()}
    return value if isinstance(value, (bool, int, float)) else str(value)
