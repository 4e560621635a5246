"""The register of all settings, made from the structs of the tables. Commands, checks and the reference are generated
from it."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import FieldInfo

from relight.settings.alert_settings import AlertSettings
from relight.settings.checkpoint_settings import CheckpointSettings
from relight.settings.environment import PROCESS_VARIABLES, EnvironmentSettings, text_of, typed, variable_of
from relight.settings.kinds import SettingsTable, fields_of
from relight.settings.supervise_settings import SuperviseSettings

TABLES: dict[str, type[SettingsTable]] = {
    "checkpoint": CheckpointSettings,
    "supervise": SuperviseSettings,
    "alerts": AlertSettings,
    "environment": EnvironmentSettings,
}
"""The tables of ``relight.toml``."""
_CLASSES = ("limits", "compact", "peers")
"""Tables of ``[checkpoint]`` that are named for a class, and not for a function."""


class Setting(NamedTuple):
    """One setting. ``name`` is its table and key in the file."""

    name: str
    kind: str
    """Allowed values, in words."""
    default: str
    """The default, in words, because some defaults are computed."""
    doc: str
    variable: str
    """The equivalent environment variable."""
    argument: str
    """The equivalent keyword argument or flag, if there is one in addition to ``--set``."""
    secret: bool
    """Whether its value is never shown."""
    named: bool
    """Whether it counts only in a named file, and not in one that happens to be in the working directory. This holds
    for security, and for paths that are read, written and cleaned up."""
    type: Any
    """The type of its value, with its bounds."""


def subtable(field: FieldInfo) -> type[SettingsTable] | None:
    """Return the struct of a field that is a table of settings; None for a setting."""
    return field.type if isinstance(field.type, type) and issubclass(field.type, SettingsTable) else None


def _settings(table: type[SettingsTable], above: str, defaults: Any) -> Iterator[Setting]:
    for field in fields_of(table).values():
        name, value = f"{above}.{field.name}", getattr(defaults, field.name)
        below = subtable(field)
        if below is not None:
            yield from _settings(below, name, value if isinstance(value, below) else below())
            continue
        kind, own = field.type.__metadata__[0].extra, field.type.__metadata__[-1]
        more = dict(own.extra)
        maker = above.removeprefix("checkpoint.")
        if maker != above:
            more["argument"] = f"{maker.capitalize() if maker in _CLASSES else maker}({field.name}=)"
        more |= {"default": more["default"] or _words(value), "variable": variable_of(name, more["variable"])}
        yield Setting(name, kind["kind"], doc=own.description, type=field.type, **more)


def _words(value: Any) -> str:
    """Return a default in words."""
    if value is msgspec.UNSET or value in ("", ()):
        return "none"
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


@cache
def settings_by_name() -> dict[str, Setting]:
    """Return all settings, in the order in which they are shown. The first call takes some milliseconds."""
    return {setting.name: setting for name, table in TABLES.items() for setting in _settings(table, name, table())}


@cache
def settings_by_variable() -> dict[str, Setting]:
    """Return all settings by their environment variables."""
    return {setting.variable: setting for setting in settings_by_name().values()}


def typed_text(setting: Setting, text: str) -> Any:
    """Return a variable's text as the type of its setting, one of a table's own keys. Raise ``ConfigError`` if it is invalid."""
    table, _, key = setting.name.partition(".")
    return typed(TABLES[table], key, text, setting.variable)


def from_variable(name: str) -> Any:
    """Return the value that a variable gives to a setting, one of a table's own keys; None if the variable is not set."""
    table, _, key = name.partition(".")
    own = fields_of(TABLES[table])[key].type.__metadata__[-1]
    variable = variable_of(name, own.extra["variable"])
    text = text_of(variable)
    return typed(TABLES[table], key, text, variable) if text else None


def nearest(name: str) -> str:
    """Return the setting that was likely meant; empty if none is similar. The part after the last dot is compared
    first, in its table."""
    table, _, key = name.rpartition(".")
    siblings = {setting.removeprefix(f"{table}.") for setting in settings_by_name() if setting.startswith(f"{table}.")}
    tables = {setting.rpartition(".")[0] for setting in settings_by_name()} | {"alerts.rules"}
    matches = get_close_matches(key, {sibling.partition(".")[0] for sibling in siblings}, 1, 0.6)
    if matches and table:
        return f"{table}.{matches[0]}"
    matches = get_close_matches(name, [*settings_by_name(), *sorted(tables)], 1, 0.7)
    return matches[0] if matches else ""


def nearest_variable(name: str) -> str:
    """Return the environment variable that was likely meant; empty if none is similar."""
    matches = get_close_matches(name, [*settings_by_variable(), *PROCESS_VARIABLES], 1, 0.75)
    return matches[0] if matches else ""
