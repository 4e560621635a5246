"""The JSON schema of relight.toml, for editors: ``relight config schema``. It is made from the register of settings."""

from __future__ import annotations

from typing import Any

from relight.settings.registry import NAMED_ONLY, SETTINGS, TABLES

SCHEMA = "https://json-schema.org/draft/2020-12/schema"
_TEXT: dict[str, Any] = {"type": "string"}
_TEXTS: dict[str, Any] = {"type": "array", "items": _TEXT}
_TABLE: dict[str, Any] = {"type": "object"}


def _number(least: float, most: float | None = None, *, above: bool = False, whole: bool = False) -> dict[str, Any]:
    bounds = {"exclusiveMinimum" if above else "minimum": least} | ({} if most is None else {"maximum": most})
    return {"type": "integer" if whole else "number", **bounds}


def _one_of(*words: str) -> dict[str, Any]:
    return {"enum": list(words)}


KINDS: dict[str, dict[str, Any]] = {
    "true or false": {"type": "boolean"},
    "seconds": _number(0),
    "bytes": _number(0, whole=True),
    "bytes a second": _number(0, above=True),
    "a whole number from 0 up": _number(0, whole=True),
    "a whole number from 1 up": _number(1, whole=True),
    "a whole number from 1 to 4": _number(1, 4, whole=True),
    "a whole number from 1 to 19": _number(1, 19, whole=True),
    "a whole number from 1 to 32": _number(1, 32, whole=True),
    "a number from 0 up": _number(0),
    "a number above 0": _number(0, above=True),
    "a number above 0, at most 1": _number(0, 1, above=True),
    "a number from 0 to 86400": _number(0, 86400),
    "a share between 0 and 1": _number(0, 1),
    "a share from 0 to 0.9": _number(0, 0.9),
    'a time: "36h", or seconds': {"type": ["string", "number"]},
    'a size: "500GB", or bytes': {"type": ["string", "number"]},
    "a directory, or 0": {"type": ["string", "integer"]},
    "info, warning or critical": _one_of("info", "warning", "critical"),
    '"ask", "refuse" or "take"': _one_of("ask", "refuse", "take"),
    '"min" or "max"': _one_of("min", "max"),
    '"newest" or "queue"': _one_of("newest", "queue"),
    '"auto", "never" or "always"': _one_of("auto", "never", "always"),
    '"cpu" or "gpu"': _one_of("cpu", "gpu"),
    "quiet, warnings, default, info or debug": _one_of("quiet", "warnings", "default", "info", "debug"),
    "a table of names and factors": {**_TABLE, "additionalProperties": _number(0, above=True)},
    "a table: disk, device": {**_TABLE, "additionalProperties": _number(0, 1)},
    "a table of patterns and ways": {**_TABLE, "additionalProperties": _TEXT},
    "a table of patterns and bounds": {**_TABLE, "additionalProperties": {"type": ["string", "number"]}},
    "a table of patterns and codecs": {**_TABLE, "additionalProperties": _TEXT},
    "a table for each further store, near to far": {**_TABLE, "additionalProperties": _TABLE},
    **dict.fromkeys(
        (
            "a list of patterns", "a list of modules", "a list of aws, gcp, azure, addresses", "a list of addresses",
            "a list of addresses, env:NAME, file:PATH", 'a list of times: "22:00-07:00"',
        ),
        _TEXTS,
    ),
    **dict.fromkeys(
        (
            "a metric's name", "a component's name", "a path", "a name", "a name: Europe/Berlin", "a store", "an address", "a directory",
            "PATTERN=WAY, parted by spaces", "a spec: ed25519:file:PATH", "a spec: file:PATH, or none",
        ),
        _TEXT,
    ),
    **{key: {"anyOf": [_TEXT, _TEXTS]} for key in ("specs: file:PATH, env:NAME", "specs: ed25519:PUBLIC KEY")},
}  # fmt: skip
"""The JSON schema of each kind of value."""


def schema() -> dict[str, Any]:
    """Return the JSON schema of the file. Editors complete keys with it, show what each is for, and mark mistakes of type and range."""
    root: dict[str, Any] = {
        "$schema": SCHEMA,
        "title": "relight.toml",
        "description": "Settings of Relight. Each has a variable that overrides it: relight config show --all",
        "type": "object",
        "additionalProperties": False,
        "properties": {name: {"type": "object", "additionalProperties": False, "properties": {}} for name in TABLES},
    }
    for setting in SETTINGS.values():
        *tables, key = setting.name.split(".")
        below = root
        for table in tables:
            empty = {"type": "object", "additionalProperties": False, "properties": {}}
            below = below["properties"].setdefault(table, empty)
        named = " Counts only in a named file." if setting.name in NAMED_ONLY else ""
        text = f"{setting.doc}. Default: {setting.default}. Variable: {setting.variable}.{named}"
        below["properties"][key] = {**KINDS[setting.kind], "description": text}
    return root
